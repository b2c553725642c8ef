"""A dimension that several operands and results of an equation share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mpmd.compiler.jaxprs.equations import Atom, aval_of


@dataclasses.dataclass(frozen=True)
class Axis:
    """A dimension along which an equation can be computed in parts.

    Attributes:
      ins: for operands that have it, by position, which of their dimensions it is. The others are read whole.
      outs: the same for results.
      combine: makes the result of two parts' results, where no result has the dimension. Where some have it,
        the others do not depend on it.
    """

    ins: Mapping[int, int]
    outs: Mapping[int, int]
    combine: Callable[[Any, Any], Any] | None = None


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(aval_of(atom).shape)
