"""The exchanges among a group's devices, read from the text of the programs that XLA has compiled."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from mpmd.program import Program, arguments, jitted
from mpmd.sharding import with_auto_axes

_OPERATIONS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|reduce-scatter"
_COLLECTIVE = re.compile(rf" = (.*?) ({_OPERATIONS})(?:-start)?\(")
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


def collectives_in(text: str) -> tuple[Collective, ...]:
    """The collectives in the text of a compiled program, in order; one in a loop counts once."""
    found = []
    for results, operation in _COLLECTIVE.findall(text):
        arrays = [
            (tuple(int(size) for size in sizes.split(",") if size), int(bits or 8) // 8)
            for _, bits, sizes in _ARRAY.findall(results)
        ]
        nbytes = sum(math.prod(shape) * width for shape, width in arrays)
        found.append(Collective(operation, tuple(shape for shape, _ in arrays), nbytes))
    return tuple(found)


def collectives_of(
    program: Program, submeshes: Sequence[AbstractMesh], devices: Sequence[jax.Device]
) -> dict[str, tuple[Collective, ...]]:
    """The collectives of each executable of a program whose specs are all known, by its name.

    Args:
      submeshes: the shapes of the groups'.
      devices: for which the executables are compiled; as many as the largest group has, or more.

    Raises: ``ValueError`` when there are too few.
    """
    if (largest := max(submesh.size for submesh in submeshes)) > len(devices):
        raise ValueError(
            f"to compile for a group of {largest} devices takes as many here, and there are "
            f"{len(devices)}; JAX_NUM_CPU_DEVICES={largest} in the environment makes that many of the CPU"
        )
    found: dict[str, tuple[Collective, ...]] = {}
    for group, submesh in zip(program.plan.programs, submeshes, strict=True):
        axes = with_auto_axes(submesh)
        shaped = np.array(devices[: axes.size]).reshape(axes.axis_sizes)
        mesh = Mesh(shaped, axes.axis_names, axes.axis_types)
        for name in dict.fromkeys(run.executable for run in group.runs):
            if name not in found:
                executable = program.plan.executable(name)
                lowered = jitted(program.functions[name], executable, mesh).lower(*arguments(executable))
                found[name] = collectives_in(lowered.compile().as_text() or "")
    return found
