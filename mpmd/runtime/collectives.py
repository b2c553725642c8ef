"""The code and the costs of compiled executables, and the exchanges among devices in the code."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

OPERATIONS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
"""XLA's names of the exchanges among devices; asynchronous ones end in ``-start`` and ``-done``."""

_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(OPERATIONS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange among devices in a compiled program.

    Attributes:
      operation: as XLA calls it, such as ``all-reduce``.
      shapes: of its results on one device.
      nbytes: of its results on one device.
    """

    operation: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


class ExecutableAnalysis(NamedTuple):
    """The code of a lowered or compiled executable, and the costs that XLA estimates.

    Attributes:
      text: the module as JAX has lowered it, or as XLA has compiled it.
      costs: as of ``jax.stages.Compiled.cost_analysis``; empty where the backend does not say.
    """

    text: str
    costs: Mapping[str, float]


def collectives_in(text: str) -> tuple[Collective, ...]:
    """The collectives in the text of a compiled program, in order; one in a loop counts once."""
    collectives = []
    for results, operation in _COLLECTIVE.findall(text):
        arrays = [
            (tuple(int(size) for size in sizes.split(",") if size), int(bits or 8) // 8)
            for _, bits, sizes in _ARRAY.findall(results)
        ]
        nbytes = sum(math.prod(shape) * width for shape, width in arrays)
        collectives.append(Collective(operation, tuple(shape for shape, _ in arrays), nbytes))
    return tuple(collectives)
