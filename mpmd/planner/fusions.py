"""Fusions: the chains of equations that XLA makes one pass over memory, and the values between them.

The formulas have them for the operations of a layer (``profiling/task_work.py``), and plans for the equations
of a task (``trials/device_work.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.cost import has_reduction, is_fused, is_renamed, is_window
from mpmd.compiler.jaxprs.equations import size
from mpmd.compiler.jaxprs.kernels import NO_KERNEL_VALUES, KernelValues

_OF_DIMENSIONS = frozenset("broadcast_in_dim reduce_max reduce_min reduce_sum".split())

Value = TypeVar("Value", bound=Hashable)
Equation = tuple[JaxprEqn, Collection[Value], Collection[Value]]
"""An equation with the values that it reads and makes."""


@dataclasses.dataclass(frozen=True)
class Fusions(Generic[Value]):
    """The values that equations read from memory and write there, under the usual fusions of XLA.

    A chain of elementwise equations is one fusion, into which reductions of its results go, too. Products,
    sorts, scatters and the like read operands from memory and write their results there. Another name of a
    value in memory, such as a reshaped one, is not written again.

    Attributes:
      written: values that are written to memory, or are there from the start.
      reads: for each equation, the values in memory from which its results are computed.
      last: for each value in memory, the position of the last equation that reads it.
    """

    equations: Sequence[Equation[Value]]
    written: set[Value]
    reads: list[frozenset[Value]]
    last: dict[Value, int]

    @classmethod
    def of(
        cls,
        equations: Sequence[Equation[Value]],
        kept: Collection[Value],
        of_kernels: KernelValues[Value] = NO_KERNEL_VALUES,
        free: Collection[Value] = (),
    ) -> Fusions[Value]:
        """The fusions of equations.

        Args:
          kept: values that are in memory in any case, since further equations compute or read them.
          of_kernels: no fusion goes across operands of kernels, and values inside kernels are in no memory.
          free: constants in no memory, which their readers compute.
        """
        written, windows = _memory_values(equations, kept, of_kernels.operands)
        written -= of_kernels.inside | {*free}
        in_memory = written | (windows - of_kernels.inside)
        sources = dict.fromkeys([*of_kernels.inside, *free], frozenset[Value]())
        fusions = cls(equations, written, [], {})
        for position, (_, operands, results) in enumerate(equations):
            read = frozenset[Value]().union(*(sources.get(value, {value}) for value in operands))
            fusions.reads.append(read)
            fusions.last.update(dict.fromkeys(read, position))
            made = (value for value in results if value not in free)
            sources |= {value: frozenset({value}) if value in in_memory else read for value in made}
        return fusions

    def most_held(
        self, kept: Collection[Value], nbytes: Callable[[Value], float], within: Iterable[float] = ()
    ) -> float:
        """The most bytes at once of values that only these equations read, each until its last reader.

        Args:
          kept: values that further equations compute or read.
          within: for each equation, the bytes that its bodies hold.
        """
        changes = [0.0] * (len(self.equations) + 1)
        for position, (_, _, results) in enumerate(self.equations):
            for value in results:
                if value in self.written and value not in kept and value in self.last:
                    last = self.last[value]
                    # A fusion can write where it reads.
                    until = last + (not is_fused(self.equations[last][0]))
                    changes[position] += nbytes(value)
                    changes[max(until, position + 1)] -= nbytes(value)
        held = itertools.accumulate(changes)
        return max(map(sum, itertools.zip_longest(held, within, fillvalue=0.0)))


def _memory_values(
    equations: Sequence[Equation[Value]], kept: Collection[Value], of_kernels: Collection[Value]
) -> tuple[set[Value], set[Value]]:
    """Returns the values that equations write to memory, and parts of values, which their readers read there.

    Args:
      of_kernels: the operands and results of kernels.
    """
    written, windows = set(kept), set[Value]()
    for eqn, reads, makes in equations:
        if is_window(eqn):
            windows.update(makes)
        elif not is_fused(eqn):
            written.update(reads)
            written.update(makes)
        elif has_reduction(eqn):
            written.update(makes)
        else:
            written.update(value for value in makes if value in of_kernels)
    named = set(written)
    for eqn, reads, makes in equations:
        if _is_renamed(eqn) and not named.isdisjoint(reads):
            written -= {*makes} - {*kept}
            named.update(makes)
    return written, windows


def _is_renamed(eqn: JaxprEqn) -> bool:
    """Whether a result is its operand in memory, also with dimensions of one element more or less."""
    if is_renamed(eqn):
        return True
    return eqn.primitive.name in _OF_DIMENSIONS and size(eqn.invars[0]) == size(eqn.outvars[0])
