"""A step cut into work, as ``split``, ``shard`` and ``place`` leave it, in jaxpr equations.

Grammar, in the order of the passes::

    TaskGraph    ::= CutStep outer-equation* StageWork* Accumulator* task-list*   StageWork has no marks
    ShardedGraph ::= TaskGraph Spec-of-each-outer-value gathered-copy*
    PlacedGraph  ::= TaskGraph PlacedEqn* GroupSet-of-each-outer-value

``CutStep`` is in ``steps.py``. ``str()`` prints each level, and ``checks.py`` checks its invariants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import aval_of, free_variables, makers_of
from mpmd.compiler.jaxprs.printing import Names, groups_text, indented, levels_text
from mpmd.compiler.jaxprs.sharded_dimensions import ShardedDimensions
from mpmd.compiler.steps import CutStep
from mpmd.ir.plan import Cell, Spec, TaskType
from mpmd.ir.specs import dimensions_of

GroupSet = frozenset[int]
"""The groups that hold a value or run an equation."""


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The equations of a stage's tasks of one type, which are the same for all microbatches.

    A stage's backward is either one ``bwd``, or a ``bwdA`` and a ``bwdW`` if the schedule has such tasks.

    Attributes:
      reads: variables of outer values, of the microbatch index, of accumulator states and of other work.
      makes: variables that other work reads.
    """

    work: TaskType
    eqns: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]


def stage_work(eqns: Mapping[TaskType, Sequence[JaxprEqn]]) -> tuple[StageWork, ...]:
    reads = {work: tuple(free_variables(eqns_of_work)) for work, eqns_of_work in eqns.items()}
    read = set().union(*reads.values())
    return tuple(
        StageWork(
            work,
            tuple(eqns_of_work),
            reads[work],
            makes=tuple(var for eqn in eqns_of_work for var in eqn.outvars if var in read),
        )
        for work, eqns_of_work in eqns.items()
    )


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """State that one work updates in every microbatch.

    The gradient of a weight is one state, which its stage updates on every slice of a microbatch. There is
    an entry for each work then, with the same ``state``, ``initial`` and ``result``.

    Attributes:
      work: the work whose equations turn ``state`` into ``updated``.
      initial: the outer value from which it starts. No equation and no other accumulator reads this value.
      result: the outer variable of its value after the last microbatch.
      ordered, is_carry: as in the ``LoopResult`` that it accumulates.
    """

    work: TaskType
    state: Var
    updated: Var
    initial: Var
    result: Var
    ordered: bool
    is_carry: bool = False


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """A step cut into work.

    Attributes:
      outer: all equations outside of loops, in order. Equations that depend on an accumulator's result run
        after its loop; other equations may run before it.
      stage_work: the work of the loops, loop by loop in the order in which one microbatch passes through it.
        Its equations read outer variables directly.
      tasks: for each loop what each group of its schedule runs, first to last; it has been checked.
    """

    step: CutStep
    outer: tuple[JaxprEqn, ...]
    stage_work: tuple[StageWork, ...]
    accumulators: tuple[Accumulator, ...]
    tasks: tuple[tuple[tuple[Cell, ...], ...], ...]

    @property
    def stage_reads(self) -> Iterator[tuple[Var, int]]:
        yield from ((var, member.work.stage) for member in self.stage_work for var in member.reads)
        yield from ((a.initial, a.work.stage) for a in self.accumulators)

    @property
    def loops_before(self) -> dict[Var, int]:
        """For the results of accumulators, the number of loops after which they are there."""
        return {a.result: self.step.loop_of(a.work.stage) + 1 for a in self.accumulators}

    @property
    def in_loops(self) -> set[Var]:
        """The variables that are another value in every microbatch."""
        computed = makers_of(eqn for member in self.stage_work for eqn in member.eqns)
        return {*computed, *(loop.index for loop in self.step.loops), *(a.state for a in self.accumulators)}

    def __str__(self) -> str:
        return "\n".join(self.lines(self.step.names()))

    def lines(self, names: Names) -> list[str]:
        lines = [*self.step.argument_lines(names), "outside the loop"]
        lines += indented(map(names.equation, self.outer))
        for member in self.stage_work:
            makes = names.all(member.makes) or "nothing that others read"
            lines.append(f"{member.work}: {names.all(member.reads)} -> {makes}")
            lines += indented(map(names.equation, member.eqns))
        lines.append("accumulators")
        for a in self.accumulators:
            lines.append(
                f"  {names.typed(a.result)} starts as {names.of(a.initial)}, "
                f"{a.work} turns {names.of(a.state)} into {names.of(a.updated)}"
            )
        for loop, tasks in enumerate(self.tasks):
            lines.append("tasks" if len(self.tasks) == 1 else f"tasks of loop {loop}")
            lines += [f"  group {i}: {' '.join(map(str, cells))}" for i, cells in enumerate(tasks)]
        return [*lines, "results", *indented(self.step.result_lines(names))]


@dataclasses.dataclass(frozen=True)
class ShardedGraph:
    """A task graph with how values are sharded within a group.

    Attributes:
      specs: the known specs of outer variables and accumulators. An accumulator of partial sums has one
        dimension more than the sum: the first one, which counts the partial sums.
      gathered: for each gathered copy that tasks read, the sharded value that an equation before the loop
        copies.
    """

    graph: TaskGraph
    specs: Mapping[Var, Spec]
    gathered: Mapping[Var, Var]

    def dimensions(self, var: Var) -> ShardedDimensions:
        return dimensions_of(self.specs[var], len(aval_of(var).shape))

    def __str__(self) -> str:
        graph, names = self.graph, self.graph.step.names()
        lines = [*graph.lines(names), "sharded within a group"]
        shown = (*(a.var for a in graph.step.arguments), *(a.result for a in graph.accumulators))
        sharded = (f"{names.typed(var)} {spec}" for var in shown if (spec := self.specs.get(var)))
        lines += indented(sharded)
        if self.gathered:
            lines.append("gathered once per step")
            lines += [
                f"  {names.typed(copy)} {self.specs[copy]} of {names.of(var)}"
                for copy, var in self.gathered.items()
            ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class PlacedEqn:
    """An outer equation and the groups that run it.

    ``segment`` is the number of loops that run before it; ``levels`` has, for each group that runs it, how
    many exchanges between groups come before it, counted from the end of the last loop before it.
    """

    eqn: JaxprEqn
    levels: Mapping[int, int]
    segment: int


@dataclasses.dataclass(frozen=True)
class PlacedGraph:
    """A task graph with the groups of everything.

    Attributes:
      mpmd_dim: the number of groups.
      stage_groups: the group of each stage.
      eqns: the outer equations in order.
      homes: for each outer variable (argument, constant, equation or accumulator result) the groups that
        have it without receiving it from another one in this step.
      output_groups: for each result, the groups that hold it after the step.
      specs: the known specs of outer variables and accumulators within a group.
    """

    graph: TaskGraph
    mpmd_dim: int
    stage_groups: tuple[int, ...]
    eqns: tuple[PlacedEqn, ...]
    homes: Mapping[Var, GroupSet]
    output_groups: tuple[GroupSet, ...]
    specs: Mapping[Var, Spec]

    def __str__(self) -> str:
        step = self.graph.step
        names = step.names()
        lines = [f"stage {stage} is on group {group}" for stage, group in enumerate(self.stage_groups)]
        lines.append("arguments and constants")
        for var in step.inputs:
            sharded = f", sharded {spec}" if (spec := self.specs.get(var)) else ""
            lines.append(f"  {names.typed(var)} on {groups_text(self.homes[var])}{sharded}")
        for segment in range(len(step.outside)):
            if segment:
                lines += self._accumulator_lines(names, segment - 1)
            lines += [step.segment_text(segment), *self._outside_lines(names, segment)]
        lines.append("results")
        for line, groups in zip(step.result_lines(names), self.output_groups, strict=True):
            lines.append(f"  on {groups_text(groups)}: {line}")
        return "\n".join(lines)

    def _accumulator_lines(self, names: Names, loop: int) -> list[str]:
        step = self.graph.step
        lines = [f"accumulated in {'the loop' if len(step.loops) == 1 else f'loop {loop}'}"]
        for accumulator in self.graph.accumulators:
            if step.loop_of(stage := accumulator.work.stage) == loop:
                by = f"{accumulator.work} on {self.stage_groups[stage]}"
                lines.append(f"  {names.typed(accumulator.result)} by {by}")
        return lines

    def _outside_lines(self, names: Names, segment: int) -> list[str]:
        return [
            f"  {names.equation(placed.eqn)}    # {levels_text(placed.levels)}"
            for placed in self.eqns
            if placed.segment == segment
        ]
