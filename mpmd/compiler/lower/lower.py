"""Writes the placed step down as one straight-line program per group.

The instructions of all groups are projections of one total order in which a message is sent and its receive
posted at the same moment. So the groups cannot deadlock, even with a transport in which a send waits for its
receive.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np
from jax.extend.core import Jaxpr, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.graph import Accumulator, PlacedEqn, PlacedGraph
from mpmd.compiler.jaxprs.equations import free_variables, make_jaxpr, operands
from mpmd.compiler.lower.cells import CellLowering, LoweredCell
from mpmd.compiler.lower.executables import ExecutableTable
from mpmd.compiler.lower.group_meshes import GroupMeshes
from mpmd.compiler.lower.liveness import add_frees_and_donations
from mpmd.errors import CompileError
from mpmd.ir.names import INDEX_PATTERN, constant_name, index_name, operand, outside_name
from mpmd.ir.plan import (
    AnyTask,
    Aval,
    Cell,
    ConstantLeaf,
    GroupProgram,
    HostCall,
    InputLeaf,
    Instruction,
    LoopStages,
    Name,
    OutputLeaf,
    OutsideTask,
    Plan,
    Recv,
    Run,
    Send,
    Spec,
    Task,
)
from mpmd.keys import encode, to_aval
from mpmd.language.callbacks import HostCallback, callback_of
from mpmd.program import Program
from mpmd.schedules import TaskLists, total_order

INDEX = Aval((), "int32", 4)


def lower(placed: PlacedGraph, submeshes: Sequence[AbstractMesh], specs: ArgumentSpecs) -> Program:
    """Lowers a placed step to a program.

    Args:
      submeshes: the shape of each group's submesh.
      specs: how arguments and results are sharded, and whether the specs of other values are left to the
        groups' compilers.

    Raises: ``CompileError`` naming every equation that cannot run on its group's submesh.
    """
    meshes = GroupMeshes(submeshes)
    program = _Lowering(placed, meshes, None if specs.others_are_open else ()).run()
    if meshes.faults:
        raise CompileError(meshes.faults)
    return dataclasses.replace(program, plan=add_frees_and_donations(program.plan))


class _Lowering:
    def __init__(self, placed: PlacedGraph, meshes: GroupMeshes, default_spec: Spec | None):
        self._placed = placed
        self._graph = placed.graph
        self._step = placed.graph.step
        self._table = ExecutableTable(meshes, placed.specs, default_spec)
        self._programs: list[list[Instruction]] = [[] for _ in range(placed.mpmd_dim)]
        self._tags: collections.Counter[tuple[int, int]] = collections.Counter()
        self._names: dict[Var, Name] = {argument.var: argument.path for argument in self._step.arguments}
        self._names |= {var: constant_name(i) for i, var in enumerate(self._step.constants)}
        self._callbacks: dict[HostCallback, int] = {}
        self._jaxprs: dict[tuple[int, AnyTask], Jaxpr] = {}
        self._uses = self._uses_by_group()
        self._index_groups: dict[int, set[int]] = collections.defaultdict(set)

    def run(self) -> Program:
        """The program, without frees and donations."""
        self._send_arguments()
        self._outside(0)
        cells = CellLowering(self._graph, self._placed.stage_groups, self._table)
        for loop, tasks in enumerate(self._graph.tasks):
            self._loop(loop, tasks, cells)
            self._outside(loop + 1)
        plan = Plan(
            programs=tuple(GroupProgram(i, tuple(program)) for i, program in enumerate(self._programs)),
            executables=tuple(self._table.executables.values()),
            inputs=self._input_leaves(),
            constants=self._constant_leaves(),
            outputs=self._output_leaves(),
            submeshes=tuple(tuple(submesh.shape.items()) for submesh in self._table.meshes.submeshes),
            loops=tuple(
                LoopStages(
                    schedule=loop.schedule.name,
                    first_stage=loop.first_stage,
                    num_stages=loop.schedule.num_stages,
                    num_microbatches=loop.num_microbatches,
                    ends=loop.ends,
                    slices=loop.schedule.slices,
                )
                for loop in self._step.loops
            ),
        )
        constants = {
            self._names[var]: np.asarray(encode(value)) for var, value in self._step.constants.items()
        }
        constants |= {index_name(m): np.asarray(m, np.int32) for m in self._index_groups}
        return Program(
            plan=plan,
            functions=self._table.functions,
            constants=constants,
            jaxprs=self._jaxprs,
            callbacks=tuple(self._callbacks),
            python_calls=tuple(self._table.python_calls),
        )

    def _input_leaves(self) -> tuple[InputLeaf, ...]:
        return tuple(
            InputLeaf(
                path=argument.path,
                name=argument.path if self._placed.homes[argument.var] else None,
                aval=to_aval(argument.var),
                mpmd_idxs=tuple(sorted(self._placed.homes[argument.var])),
                spec=self._table.specs.get(argument.var, ()),
                donated=argument.donated,
            )
            for argument in self._step.arguments
        )

    def _constant_leaves(self) -> tuple[ConstantLeaf, ...]:
        homes = self._placed.homes
        closed_over = (
            ConstantLeaf(self._names[var], to_aval(var), tuple(sorted(homes[var])))
            for var in self._step.constants
            if homes[var]
        )
        indices = (
            ConstantLeaf(index_name(m), INDEX, tuple(sorted(groups)))
            for m, groups in sorted(self._index_groups.items())
        )
        return (*closed_over, *indices)

    def _output_leaves(self) -> tuple[OutputLeaf, ...]:
        return tuple(
            OutputLeaf(
                path=result.path,
                name=self._names[result.var],
                aval=to_aval(result.var),
                mpmd_idxs=tuple(sorted(groups)),
                spec=self._table.spec_of(result.var, min(groups)),
            )
            for result, groups in zip(self._step.results, self._placed.output_groups, strict=True)
        )

    def _uses_by_group(self) -> dict[Var, collections.Counter[int]]:
        uses: dict[Var, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        for placed in self._placed.eqns:
            for var in operands(placed.eqn):
                uses[var].update(placed.levels.keys())
        for var, stage in self._graph.stage_reads:
            uses[var][self._placed.stage_groups[stage]] += 1
        for result, groups in zip(self._step.results, self._placed.output_groups, strict=True):
            uses[result.var].update(groups)
        return uses

    def _send(self, src: int, receivers_of: Mapping[Name, Iterable[int]]) -> None:
        """Sends values to other groups, one message for each."""
        by_group: dict[int, list[Name]] = collections.defaultdict(list)
        for name, groups in receivers_of.items():
            for group in groups:
                by_group[group].append(name)
        for dst, names in sorted(by_group.items()):
            tag = self._tags[src, dst]
            self._tags[src, dst] += 1
            self._programs[src].append(Send(tuple(names), dst, tag))
            self._programs[dst].append(Recv(tuple(names), src, tag))

    def _send_all(self, values: Iterable[tuple[Name, int, Set[int]]]) -> None:
        receivers_by_source: dict[int, dict[Name, Iterable[int]]] = collections.defaultdict(dict)
        for name, source, receivers in values:
            receivers_by_source[source][name] = sorted(receivers)
        for source, receivers_of in sorted(receivers_by_source.items()):
            self._send(source, receivers_of)

    def _send_arguments(self) -> None:
        homes = self._placed.homes
        self._send_all(
            (argument.path, min(homes[argument.var]), elsewhere)
            for argument in self._step.arguments
            if (elsewhere := self._uses[argument.var].keys() - homes[argument.var])
        )

    def _outside(self, segment: int) -> None:
        here = [placed for placed in self._placed.eqns if placed.segment == segment]
        members: dict[tuple[int, int], list[PlacedEqn]] = collections.defaultdict(list)
        for placed in here:
            for group, level in placed.levels.items():
                members[level, group].append(placed)
        # For each variable made here, the level and the group that others get it from.
        sources = {
            var: min((level, group) for group, level in placed.levels.items())
            for placed in here
            for var in placed.eqn.outvars
        }
        for (level, group), eqns in sorted(members.items()):
            self._run_outside(self._task(segment, level), group, eqns, sources)

    def _task(self, segment: int, level: int) -> OutsideTask:
        if 0 < segment < len(self._step.loops):
            return OutsideTask("between", level, segment)
        return OutsideTask("before" if segment < len(self._step.loops) else "after", level)

    def _run_outside(
        self,
        task: OutsideTask,
        group: int,
        members: Sequence[PlacedEqn],
        sources: Mapping[Var, tuple[int, int]],
    ) -> None:
        eqns = [placed.eqn for placed in members]
        here = collections.Counter(var for eqn in eqns for var in operands(eqn))
        makes = [
            var
            for eqn in eqns
            for var in eqn.outvars
            if self._uses[var][group] > here[var] or self._receivers(var, group, sources)
        ]
        if not makes and not any(eqn.effects for eqn in eqns):
            return
        reads = free_variables(eqns)
        callbacks = [eqn for eqn in eqns if callback_of(eqn)]
        callback_operands = [var for eqn in callbacks for var in operands(eqn)]
        for i, var in enumerate(makes):
            # Groups that compute the same value call it the same.
            self._names.setdefault(var, outside_name(task, group, i))
        jaxpr = self._jaxprs[group, task] = make_jaxpr(reads, eqns, [*makes, *callback_operands])
        executable = self._table.add(f"{task}.{group}", group, jaxpr, len(makes))
        inputs, outputs = ([self._names[var] for var in variables] for variables in (reads, makes))
        operand_names = [outside_name(task, group, operand(i)) for i in range(len(callback_operands))]
        self._programs[group].append(Run(task, executable, tuple(inputs), (*outputs, *operand_names)))
        rest = iter(operand_names)
        for eqn in callbacks:
            values = tuple(next(rest) for _ in eqn.invars)
            self._call_back(group, values, eqn.params["callback"], task)
        self._send(group, {self._names[var]: self._receivers(var, group, sources) for var in makes})

    def _call_back(
        self, group: int, values: tuple[Name, ...], callback: HostCallback, task: Task | OutsideTask
    ) -> None:
        number = self._callbacks.setdefault(callback, len(self._callbacks))
        self._programs[group].append(HostCall(values, number, task))

    def _receivers(self, var: Var, group: int, sources: Mapping[Var, tuple[int, int]]) -> list[int]:
        if var not in sources or sources[var][1] != group:
            return []
        return sorted(self._uses[var].keys() - self._placed.homes[var])

    def _loop(self, number: int, tasks: TaskLists, cells: CellLowering) -> None:
        loop = self._step.loops[number]
        accumulators = [a for a in self._graph.accumulators if a.work.stage in loop.stages]
        states = {a.state: self._names[a.initial] for a in accumulators}
        for _, cell in total_order(tasks, loop.numbers):
            if (lowered := cells.lower(cell)) is not None:
                self._run_cell(self._placed.stage_groups[cell.tasks[0].stage], cell, lowered, states)
        self._send_results(accumulators, states)

    def _run_cell(self, group: int, cell: Cell, lowered: LoweredCell, states: dict[Var, Name]) -> None:
        """Updates ``states`` to the names of the accumulators' states after the cell."""
        first = cell.tasks[0].microbatch
        inputs = tuple(
            value.pattern % (first + value.offset)
            if value.pattern
            else states.get(value.var) or self._names[value.var]
            for value in lowered.reads
        )
        outputs = tuple(value.pattern % (first + value.offset) for value in lowered.makes)
        for value in lowered.reads:
            if value.pattern == INDEX_PATTERN:
                self._index_groups[first + value.offset].add(group)
        states.update(zip(lowered.updates, outputs, strict=False))
        callback_operands = [
            tuple(pattern % (first + callback.offset) for pattern in callback.patterns)
            for callback in lowered.callbacks
        ]
        all_outputs = (*outputs, *itertools.chain(*callback_operands))
        self._programs[group].append(Run(cell, lowered.executable, inputs, all_outputs))
        for callback, values in zip(lowered.callbacks, callback_operands, strict=True):
            task = Task(callback.work.kind, callback.work.stage, first + callback.offset)
            self._call_back(group, values, callback.callback, task)
        self._jaxprs[group, cell] = lowered.jaxpr
        made = zip(outputs, lowered.makes, strict=True)
        self._send(group, {name: value.receivers for name, value in made if value.receivers})

    def _send_results(self, accumulators: Iterable[Accumulator], states: Mapping[Var, Name]) -> None:
        results: list[tuple[Name, int, Set[int]]] = []
        for accumulator in accumulators:
            name = self._names[accumulator.result] = states[accumulator.state]
            group = self._placed.stage_groups[accumulator.work.stage]
            results.append((name, group, self._uses[accumulator.result].keys() - {group}))
        self._send_all(results)
