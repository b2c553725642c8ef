"""Lowers the cells of a schedule: one executable for all cells that run the same work."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jax.extend.core import Jaxpr, Var

from mpmd.compiler.graph import Accumulator, TaskGraph
from mpmd.compiler.jaxprs.equations import free_variables, make_jaxpr, operands
from mpmd.compiler.lower.executables import ExecutableTable
from mpmd.compiler.lower.fuse import FusedWork, fuse
from mpmd.ir.names import INDEX_PATTERN, operand, output_pattern, state_pattern
from mpmd.ir.plan import Cell, TaskKind, TaskType
from mpmd.language.callbacks import HostCallback

CellWork = Sequence[tuple[TaskType, int]]
"""The work of a cell's tasks, each with how many microbatches after the cell's first one it is."""


@dataclasses.dataclass(frozen=True)
class CellValue:
    """A value that a cell reads or makes.

    Attributes:
      offset: how many microbatches after the cell's first one it belongs to.
      pattern: its name, with the microbatch left out; none for an outer value or an accumulator's state.
      receivers: the other groups that get it.
    """

    var: Var
    offset: int
    pattern: str = ""
    receivers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class CellCallback:
    """A callback of a cell: its work, its microbatch as in ``CellValue``, and the names of its operands."""

    callback: HostCallback
    work: TaskType
    offset: int
    patterns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LoweredCell:
    """A cell, lowered for any microbatch.

    Attributes:
      reads: the operands of the executable.
      makes: the outputs of the executable before the operands of ``callbacks``. The new states of ``updates``
        come first.
      updates: the accumulator states that the executable updates.
    """

    executable: str
    jaxpr: Jaxpr
    reads: tuple[CellValue, ...]
    updates: tuple[Var, ...]
    makes: tuple[CellValue, ...]
    callbacks: tuple[CellCallback, ...]


class CellLowering:
    """Lowers cells, each kind of cell once, and adds their executables to ``table``."""

    def __init__(self, graph: TaskGraph, stage_groups: Sequence[int], table: ExecutableTable):
        self._indices = {loop.index for loop in graph.step.loops}
        self._stage_groups = stage_groups
        self._table = table
        self._stage_work = {member.work: member for member in graph.stage_work}
        self._accumulators: dict[TaskType, list[Accumulator]] = collections.defaultdict(list)
        for accumulator in graph.accumulators:
            self._accumulators[accumulator.work].append(accumulator)
        self._accumulator_number = {a.updated: i for i, a in enumerate(graph.accumulators)}
        # For each variable the works that make it, with its position among all that each makes.
        self._makers: dict[Var, dict[TaskType, int]] = collections.defaultdict(dict)
        self._readers: dict[Var, list[TaskType]] = collections.defaultdict(list)
        for member in graph.stage_work:
            for position, var in enumerate(member.makes):
                self._makers[var][member.work] = position
            for var in member.reads:
                self._readers[var].append(member.work)
        self._states = {a.updated: a.state for a in graph.accumulators}
        self._in_loop = graph.in_loops
        self._lowered: dict[tuple[tuple[TaskKind, int, int], ...], LoweredCell | None] = {}

    def lower(self, cell: Cell) -> LoweredCell | None:
        """Returns a cell's executable, operands and results; ``None`` if its tasks have no equations."""
        first = cell.tasks[0].microbatch
        shape = tuple((task.kind, task.stage, task.microbatch - first) for task in cell.tasks)
        if shape not in self._lowered:
            works = list(self._works(shape))
            self._lowered[shape] = self._lower(works) if works else None
        return self._lowered[shape]

    def _works(self, shape: Iterable[tuple[TaskKind, int, int]]) -> Iterator[tuple[TaskType, int]]:
        """The work of a cell's tasks. For a ``bwd`` task this is the ``bwd`` work, or its two halves."""
        for kind, stage, offset in shape:
            halves: tuple[TaskKind, ...] = ("bwd", "bwdA", "bwdW") if kind == "bwd" else (kind,)
            yield from ((w, offset) for half in halves if (w := TaskType(half, stage)) in self._stage_work)

    def _lower(self, works: CellWork) -> LoweredCell:
        members = [(self._stage_work[work], offset) for work, offset in works]
        fused = fuse(members, self._in_loop, self._states)
        origins = {new: (var, m) for m, names in fused.names.items() for var, new in names.items()}
        # When tasks update one accumulator several times, only its first and last state leave the cell.
        updates = {a.state: (a, offset) for work, offset in works for a in self._accumulators[work]}
        first = works[0][1]  # not 0 if the first task of the cell has no equations
        free = {var: origins.get(var, (var, first)) for var in free_variables(fused.eqns)}
        read = {loop_var: var for var, (loop_var, _) in free.items()}
        # Accumulators come first on both sides, so that each is updated in its own buffer.
        reads = list(dict.fromkeys([*(read[state] for state in updates if state in read), *free]))
        makes = [self._updated(*update) for update in updates.values()]
        makes += [value for work, offset in works for value in self._made(work, offset, works)]
        outputs = [fused.names[value.offset].get(value.var, value.var) for value in makes]
        callback_operands = [var for eqn, _, _ in fused.callbacks for var in operands(eqn)]
        stands_for = {new: var for new, (var, _) in origins.items()}
        label = "+".join(str(work) for work, _ in works)
        group = self._stage_groups[works[0][0].stage]
        jaxpr = make_jaxpr(reads, fused.eqns, [*outputs, *callback_operands])
        return LoweredCell(
            executable=self._table.add(label, group, jaxpr, len(outputs), stands_for),
            jaxpr=jaxpr,
            reads=tuple(self._read(*free[var], works) for var in reads),
            updates=tuple(updates),
            makes=tuple(makes),
            callbacks=tuple(self._callbacks(fused)),
        )

    def _callbacks(self, fused: FusedWork) -> Iterator[CellCallback]:
        count: collections.Counter[tuple[TaskType, int]] = collections.Counter()
        for eqn, work, offset in fused.callbacks:
            first = count[work, offset]
            count[work, offset] += len(eqn.invars)
            patterns = (output_pattern(work, operand(first + i)) for i in range(len(eqn.invars)))
            yield CellCallback(eqn.params["callback"], work, offset, tuple(patterns))

    def _read(self, var: Var, offset: int, works: CellWork) -> CellValue:
        if var in self._indices:
            return CellValue(var, offset, INDEX_PATTERN)
        if var not in self._makers:
            return CellValue(var, offset)
        reader = next(work for work, at in works if at == offset and work in self._readers[var])
        maker = self._maker(var, reader.stage)
        return CellValue(var, offset, output_pattern(maker, self._makers[var][maker]))

    def _maker(self, var: Var, stage: int) -> TaskType:
        """The work that a stage gets a value from: its own, if that computes it, or the only one."""
        makers = list(self._makers[var])
        return next((work for work in makers if work.stage == stage), makers[0])

    def _updated(self, accumulator: Accumulator, offset: int) -> CellValue:
        number = self._accumulator_number[accumulator.updated]
        return CellValue(accumulator.updated, offset, state_pattern(accumulator.work, number))

    def _made(self, work: TaskType, offset: int, works: CellWork) -> Iterator[CellValue]:
        group = self._stage_groups[work.stage]
        for position, var in enumerate(self._stage_work[work].makes):
            readers = [
                reader
                for reader in self._readers[var]
                if self._maker(var, reader.stage) == work and (reader, offset) not in works
            ]
            if readers:
                groups = {self._stage_groups[reader.stage] for reader in readers}
                yield CellValue(var, offset, output_pattern(work, position), tuple(sorted(groups - {group})))
