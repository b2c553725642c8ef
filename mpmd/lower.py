"""Writes the placed step down as one straight-line program per group.

The instructions of all groups are projections of one total order in which a message is sent and its receive
posted at the same moment. So no order of transports, not even one in which sender and receiver have to
meet, can make the groups wait for one another in a circle.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jax.extend.core import Jaxpr, Var

from mpmd.executables import ExecutableTable, encode, to_aval
from mpmd.fuse import fuse
from mpmd.graph import Accumulator, PlacedEqn, PlacedGraph, Work
from mpmd.ir import (
    Aval,
    ConstantLeaf,
    GroupProgram,
    InputLeaf,
    Instruction,
    Name,
    OutputLeaf,
    Plan,
    Recv,
    Run,
    Send,
    Spec,
    TaskKind,
)
from mpmd.jaxpr import free_variables, make_jaxpr, operands
from mpmd.program import Program
from mpmd.schedules import total_order

INDEX = Aval((), "int32", 4)


def lower(
    placed: PlacedGraph,
    specs: Mapping[Var, Spec],
    default_spec: Spec | None,
    donated: Sequence[bool],
    mpmd_dim: int,
) -> Program:
    """Lowers a placed step to programs without frees and donations.

    Args:
      specs: how variables outside the loop are sharded within a group, as far as known.
      default_spec: the same for all others; ``None`` leaves it to the compiler.
      donated: for each argument, whether the caller gives it up.
      mpmd_dim: the number of groups.
    """
    return _Lowering(placed, ExecutableTable(specs, default_spec), mpmd_dim).run(donated)


class _Lowering:
    def __init__(self, placed: PlacedGraph, table: ExecutableTable, mpmd_dim: int):
        self._placed = placed
        self._graph = placed.graph
        self._table = table
        self._programs: list[list[Instruction]] = [[] for _ in range(mpmd_dim)]
        self._tags: collections.Counter[tuple[int, int]] = collections.Counter()
        self._names = self._argument_names()
        self._stages = {stage.work: stage for stage in self._graph.stages}
        self._accumulators: dict[Work, list[Accumulator]] = collections.defaultdict(list)
        for accumulator in self._graph.accumulators:
            self._accumulators[accumulator.work].append(accumulator)
        self._accumulator_number = {a.after: i for i, a in enumerate(self._graph.accumulators)}
        # For each variable the works that make it, with its position among all that each makes.
        self._makers: dict[Var, dict[Work, int]] = collections.defaultdict(dict)
        self._loop_readers: dict[Var, list[Work]] = collections.defaultdict(list)
        for stage in self._graph.stages:
            for position, var in enumerate(stage.makes):
                self._makers[var][stage.work] = position
            for var in stage.reads:
                self._loop_readers[var].append(stage.work)
        self._states = {a.after: a.before for a in self._graph.accumulators}
        self._in_loop = {self._graph.index, *self._states.values()}
        self._in_loop |= {v for stage in self._graph.stages for eqn in stage.eqns for v in eqn.outvars}
        self._cells: dict[tuple[tuple[TaskKind, int, int], ...], _LoweredCell | None] = {}
        self._jaxprs: dict[tuple[int, str], Jaxpr] = {}
        self._readers = self._groups_reading()
        self._uses = self._uses_by_group()
        self._index_groups: dict[int, set[int]] = collections.defaultdict(set)

    def run(self, donated: Sequence[bool]) -> Program:
        self._outside(after=False)
        self._loop()
        self._outside(after=True)
        plan = Plan(
            tuple(GroupProgram(i, tuple(program)) for i, program in enumerate(self._programs)),
            tuple(self._table.executables.values()),
            self._input_leaves(donated),
            self._constant_leaves(),
            self._output_leaves(),
        )
        traced = self._graph.traced
        constants = {self._names[var]: np.asarray(encode(value)) for var, value in traced.constants.items()}
        constants |= {_index_name(m): np.asarray(m, np.int32) for m in self._index_groups}
        return Program(plan, self._table.functions, constants, self._jaxprs)

    # Names and leaves.

    def _argument_names(self) -> dict[Var, Name]:
        traced = self._graph.traced
        names: dict[Var, Name] = dict(zip(traced.jaxpr.invars, traced.in_paths, strict=True))
        names |= {var: f"constant_{i}" for i, var in enumerate(traced.jaxpr.constvars)}
        return names

    def _input_leaves(self, donated: Sequence[bool]) -> tuple[InputLeaf, ...]:
        traced = self._graph.traced
        return tuple(
            InputLeaf(
                path,
                self._names[var] if self._placed.homes[var] else None,
                to_aval(var),
                tuple(sorted(self._placed.homes[var])),
                self._table.specs.get(var, ()),
                is_donated,
            )
            for path, var, is_donated in zip(traced.in_paths, traced.jaxpr.invars, donated, strict=True)
        )

    def _constant_leaves(self) -> tuple[ConstantLeaf, ...]:
        homes = self._placed.homes
        closed_over = (
            ConstantLeaf(self._names[var], to_aval(var), tuple(sorted(homes[var])))
            for var in self._graph.traced.jaxpr.constvars
            if homes[var]
        )
        indices = (
            ConstantLeaf(_index_name(m), INDEX, tuple(sorted(groups)))
            for m, groups in sorted(self._index_groups.items())
        )
        return (*closed_over, *indices)

    def _output_leaves(self) -> tuple[OutputLeaf, ...]:
        graph = self._graph
        return tuple(
            OutputLeaf(
                path,
                self._names[var],
                to_aval(var),
                tuple(sorted(groups)),
                self._table.specs.get(var, self._table.default),
            )
            for path, var, groups in zip(
                graph.traced.out_paths, graph.outputs, self._placed.output_groups, strict=True
            )
        )

    # Messages.

    def _groups_reading(self) -> dict[Var, set[int]]:
        """For each outer variable, the groups that need to have it."""
        readers: dict[Var, set[int]] = collections.defaultdict(set)
        for placed in self._placed.eqns:
            for var in operands(placed.eqn):
                readers[var].update(placed.levels)
        for stage in self._graph.stages:
            for var in stage.reads:
                readers[var].add(self._placed.stage_groups[stage.work.stage])
        for accumulator in self._graph.accumulators:
            readers[accumulator.initial].add(self._placed.stage_groups[accumulator.work.stage])
        for var, groups in zip(self._graph.outputs, self._placed.output_groups, strict=True):
            readers[var].update(groups)
        return readers

    def _send(self, src: int, wanted: Mapping[Name, Iterable[int]]) -> None:
        """Sends values to other groups, one message for each."""
        by_group: dict[int, list[Name]] = collections.defaultdict(list)
        for name, groups in wanted.items():
            for group in groups:
                by_group[group].append(name)
        for dst, names in sorted(by_group.items()):
            tag = self._tags[src, dst]
            self._tags[src, dst] += 1
            self._programs[src].append(Send(tuple(names), dst, tag))
            self._programs[dst].append(Recv(tuple(names), src, tag))

    # Outside the loop.

    def _outside(self, after: bool) -> None:
        members: dict[tuple[int, int], list[PlacedEqn]] = collections.defaultdict(list)
        for placed in self._placed.eqns:
            if placed.after == after:
                for group, level in placed.levels.items():
                    members[level, group].append(placed)
        sources = self._sources(after)
        for (level, group), eqns in sorted(members.items()):
            self._run_outside(f"{'after' if after else 'before'}_{level}", group, eqns, sources)

    def _sources(self, after: bool) -> dict[Var, tuple[int, int]]:
        """For each variable made here, the level and the group that others get it from."""
        return {
            var: min((level, group) for group, level in placed.levels.items())
            for placed in self._placed.eqns
            if placed.after == after
            for var in placed.eqn.outvars
        }

    def _run_outside(
        self, label: str, group: int, members: Sequence[PlacedEqn], sources: Mapping[Var, tuple[int, int]]
    ) -> None:
        eqns = [placed.eqn for placed in members]
        here = collections.Counter(var for eqn in eqns for var in operands(eqn))
        makes = [
            var
            for eqn in eqns
            for var in eqn.outvars
            if self._uses[group][var] > here[var] or self._sent(var, group, sources)
        ]
        if not makes and not any(eqn.effects for eqn in eqns):
            return
        reads = free_variables(eqns)
        for i, var in enumerate(makes):
            # Groups that compute the same value call it the same.
            self._names.setdefault(var, f"{label}.{group}.{i}")
        executable = self._table.add(f"{label}.{group}", reads, eqns, makes)
        self._jaxprs[group, label] = make_jaxpr(reads, eqns, makes)
        inputs, outputs = ([self._names[var] for var in variables] for variables in (reads, makes))
        self._programs[group].append(Run(label, executable, tuple(inputs), tuple(outputs)))
        self._send(group, {self._names[var]: self._sent(var, group, sources) for var in makes})

    def _sent(self, var: Var, group: int, sources: Mapping[Var, tuple[int, int]]) -> list[int]:
        """The groups that get a value made outside the loop from ``group``."""
        if var not in sources or sources[var][1] != group:
            return []
        return sorted(self._readers[var] - self._placed.homes[var])

    def _uses_by_group(self) -> dict[int, collections.Counter[Var]]:
        """How often each group reads each outer variable."""
        uses: dict[int, collections.Counter[Var]] = collections.defaultdict(collections.Counter)
        for placed in self._placed.eqns:
            read = list(operands(placed.eqn))
            for group in placed.levels:
                uses[group].update(read)
        for stage in self._graph.stages:
            group = self._placed.stage_groups[stage.work.stage]
            uses[group].update(stage.reads)
            uses[group].update(a.initial for a in self._accumulators[stage.work])
        for var, groups in zip(self._graph.outputs, self._placed.output_groups, strict=True):
            for group in groups:
                uses[group][var] += 1
        return uses

    # The loop.

    def _loop(self) -> None:
        graph = self._graph
        state = {a.before: self._names[a.initial] for a in graph.accumulators}
        for group, cell in total_order(graph.tasks):
            first = cell.tasks[0].microbatch
            shape = tuple((task.kind, task.stage, task.microbatch - first) for task in cell.tasks)
            if shape not in self._cells:
                self._cells[shape] = self._lower_cell(list(self._works(shape)))
            if (lowered := self._cells[shape]) is not None:
                self._run_cell(group, str(cell), lowered, first, state)
        self._send_results(state)

    def _send_results(self, state: Mapping[Var, Name]) -> None:
        wanted: dict[int, dict[Name, Iterable[int]]] = collections.defaultdict(dict)
        for accumulator in self._graph.accumulators:
            name = self._names[accumulator.result] = state[accumulator.before]
            group = self._placed.stage_groups[accumulator.work.stage]
            wanted[group][name] = sorted(self._readers[accumulator.result] - {group})
        for group, names in sorted(wanted.items()):
            self._send(group, names)

    def _run_cell(
        self, group: int, label: str, cell: _LoweredCell, first: int, state: dict[Var, Name]
    ) -> None:
        inputs = tuple(
            value.pattern % (first + value.offset)
            if value.pattern
            else state.get(value.var) or self._names[value.var]
            for value in cell.reads
        )
        outputs = tuple(value.pattern % (first + value.offset) for value in cell.makes)
        for offset in cell.indices:
            self._index_groups[first + offset].add(group)
        state.update(zip(cell.updates, outputs, strict=False))
        self._programs[group].append(Run(label, cell.executable, inputs, outputs))
        self._jaxprs[group, label] = cell.jaxpr
        self._send(group, {outputs[i]: cell.makes[i].receivers for i in cell.sent})

    def _works(self, shape: Iterable[tuple[TaskKind, int, int]]) -> Iterator[tuple[Work, int]]:
        """The work of a cell's tasks, as far as there is any; of a backward both halves if it has halves."""
        for kind, stage, offset in shape:
            halves: tuple[TaskKind, ...] = ("bwd", "bwdA", "bwdW") if kind == "bwd" else (kind,)
            yield from ((w, offset) for half in halves if (w := Work(half, stage)) in self._stages)

    def _lower_cell(self, works: Sequence[tuple[Work, int]]) -> _LoweredCell | None:
        """The executable of a cell that has these works, each this many microbatches after the first one."""
        if not works:
            return None
        members = [(self._stages[work], offset) for work, offset in works]
        fused = fuse(members, self._in_loop, self._states)
        # Of several updates the first one reads what the cell does, and the last one leaves it.
        updates = {a: offset for work, offset in works for a in self._accumulators[work]}
        read = {fused.origin[var][0]: var for var in fused.reads}
        before = [read[a.before] for a in updates if a.before in read]
        # Accumulators come first on both sides, so that each is updated in its own buffer.
        reads = [*before, *(var for var in fused.reads if var not in before)]
        makes = [self._updated(*update) for update in updates.items()]
        makes += [made for work, offset in works for made in self._made(work, offset, works)]
        outputs = [fused.variables[made.var, made.offset] for made in makes]
        origins = [fused.origin[var] for var in reads]
        label = "+".join(str(work) for work, _ in works)
        return _LoweredCell(
            self._table.add(label, reads, fused.eqns, outputs),
            make_jaxpr(reads, fused.eqns, outputs),
            tuple(self._read(var, offset, works) for var, offset in origins),
            tuple(offset for var, offset in origins if var is self._graph.index),
            tuple(a.before for a in updates),
            tuple(makes),
            tuple(i for i, made in enumerate(makes) if made.receivers),
        )

    def _read(self, var: Var, offset: int, works: Sequence[tuple[Work, int]]) -> _Value:
        """What a cell reads."""
        if var is self._graph.index:
            return _Value(var, offset, _INDEX)
        if var not in self._makers:
            return _Value(var, offset)
        reader = next(work for work, at in works if at == offset and work in self._loop_readers[var])
        maker = self._maker(var, reader.stage)
        return _Value(var, offset, _pattern(maker, self._makers[var][maker]))

    def _maker(self, var: Var, stage: int) -> Work:
        """The work that a stage gets a value from: its own, if that computes it, or the only one."""
        makers = list(self._makers[var])
        return next((work for work in makers if work.stage == stage), makers[0])

    def _updated(self, accumulator: Accumulator, offset: int) -> _Value:
        number = self._accumulator_number[accumulator.after]
        return _Value(accumulator.after, offset, f"{accumulator.work}.state{number}@%d")

    def _made(self, work: Work, offset: int, works: Sequence[tuple[Work, int]]) -> Iterator[_Value]:
        """The values that work makes for tasks outside its cell."""
        own = self._placed.stage_groups[work.stage]
        for position, var in enumerate(self._stages[work].makes):
            readers = [
                reader
                for reader in self._loop_readers[var]
                if self._maker(var, reader.stage) == work and (reader, offset) not in works
            ]
            if readers:
                groups = {self._placed.stage_groups[reader.stage] for reader in readers}
                yield _Value(var, offset, _pattern(work, position), tuple(sorted(groups - {own})))


@dataclasses.dataclass(frozen=True)
class _Value:
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
class _LoweredCell:
    """A cell for any microbatch.

    The executable takes ``reads`` and returns ``makes``, of which the first are what becomes of the states
    ``updates``. ``indices`` are the offsets of the microbatch indices it reads, ``sent`` the positions of
    what other groups get.
    """

    executable: str
    jaxpr: Jaxpr
    reads: tuple[_Value, ...]
    indices: tuple[int, ...]
    updates: tuple[Var, ...]
    makes: tuple[_Value, ...]
    sent: tuple[int, ...]


_INDEX = "index_%d"


def _pattern(work: Work, position: int) -> str:
    return f"{work}__%d.{position}"


def _index_name(microbatch: int) -> Name:
    return _INDEX % microbatch
