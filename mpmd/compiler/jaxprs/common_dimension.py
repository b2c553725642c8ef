"""A dimension that operands and results of an equation have in common, and how far passes may rely on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import shape_of

Promise = Literal["exact", "shared", "guess"]
"""The promise of a dimension.

- ``exact``: equations of the same primitive, each for a part of the dimension, give the same values.
- ``shared``: devices that divide the dimension can share the work. A partitioner of arrays can do more than
  equations for parts: look up rows of a table that is divided by rows, and add up what the devices found;
  count along a divided dimension; divide a convolution.
- ``guess``: a result that is divided like the operands is what a partitioner probably makes.
"""


class CommonDimension(NamedTuple):
    """A dimension that several operands and results of an equation have in common.

    Attributes:
      ins: for the positions of operands with the dimension, its number in the operand. Any part of the
        results reads other operands whole.
      outs: for the positions of results with the dimension, its number in the result. If empty, the dimension
        is reduced: each part contributes to a sum, or another reduction.
      promise: ``"exact"``, ``"shared"`` or ``"guess"``; see ``Promise``.
      combine: makes the result of two parts' results, where an exact dimension is reduced. Where some results
        have the dimension, results without it do not depend on it.
    """

    ins: Mapping[int, int]
    outs: Mapping[int, int]
    promise: Promise = "exact"
    combine: Callable[[Any, Any], Any] | None = None

    @property
    def is_reduced(self) -> bool:
        return not self.outs

    def size(self, eqn: JaxprEqn) -> int:
        """Returns the dimension's least size in an operand or result; a reshape may merge it with more."""
        sizes = [shape_of(eqn.invars[i])[dim] for i, dim in self.ins.items()]
        sizes += [shape_of(eqn.outvars[i])[dim] for i, dim in self.outs.items()]
        return min(sizes, default=1)

    def of_variables(self, eqn: JaxprEqn) -> Iterator[tuple[Var, int]]:
        for atoms, dims in ((eqn.invars, self.ins), (eqn.outvars, self.outs)):
            for i, dim in dims.items():
                if isinstance(atom := atoms[i], Var):
                    yield atom, dim
