"""What the passes of the compiler hand to one another. Like the passes, these hold jaxpr equations.

Grammar, from the traced step to the one that is ready to be lowered::

    TracedStep   ::= argument* constant* (equation* Loop)* equation* result*
    Loop         ::= index equation* LoopResult*         the equations have marks among them
    TaskGraph    ::= TracedStep outer-equation* StageWork* Accumulator* task-list*   StageWork has no marks
    ShardedGraph ::= TaskGraph Spec-of-each-outer-value gathered-copy*
    PlacedGraph  ::= TaskGraph PlacedEqn* GroupSet-of-each-outer-value

``str()`` of each prints it, and ``checks.py`` says what holds of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom
from mpmd.compiler.jaxprs.printing import Names, groups_text, indented, levels_text
from mpmd.ir.plan import Cell, Spec, TaskType
from mpmd.ir.stack import Leaf
from mpmd.language.annotate import mark_of
from mpmd.schedules import Schedule

PartialSums = Literal["replicated", "all", "none"]
"""Which accumulators may hold partial sums over the devices of a group: see ``mpmd_jit_with_loop``."""

Gather = Literal["task", "step"]
"""When weights that are sharded over the batch's axes are gathered: see ``mpmd_jit_with_loop``."""

GroupSet = frozenset[int]
"""The groups that hold a value or run an equation."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """A leaf of the step's arguments, or a part of one, such as ``args[0].params['w'][0:2]``."""

    path: str
    var: Var


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that the step closes over."""

    var: Var
    value: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """A leaf of the step's result, or a part of one.

    ``var`` may be an argument, and the variable of several results.
    """

    path: str
    var: Var


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """A result of the loop.

    Attributes:
      value: what the body makes of one microbatch: the addend of a plain sum, or else the new state.
      state: the variable in which the body reads the state before the microbatch; ``None`` for a plain sum.
      initial: the outer value of the state before the first microbatch.
      result: the outer variable of the state after the last microbatch.
      ordered: whether the order of the microbatches may decide the result.
      carried: whether the function of a microbatch itself reads the state, and not an operation alone.
    """

    value: Atom
    state: Var | None
    initial: Atom
    result: Var
    ordered: bool
    carried: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """A microbatch loop.

    Attributes:
      where: the user's line.
      first_stage: the number of its first stage: of all stages of the loops before.
      decided: which of the step's decisions it was traced under: see ``Decisions.of_loops``.
      index: the variable of the microbatch index, an int32 scalar.
      eqns: the body for one microbatch. It reads outer variables directly. The boundary of each mark among
        the equations says which stage ends there.
    """

    where: str
    index: Var
    eqns: tuple[JaxprEqn, ...]
    results: tuple[LoopResult, ...]
    num_microbatches: int
    schedule: Schedule
    first_stage: int = 0
    decided: int = 0

    @property
    def stages(self) -> range:
        """The numbers of its stages."""
        return range(self.first_stage, self.first_stage + self.schedule.num_stages)

    @property
    def states(self) -> tuple[Var, ...]:
        """The variables of the states that are not plain sums."""
        return tuple(result.state for result in self.results if result.state is not None)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step over flat arguments: equations and loops in turn.

    Calls outside of loops are inlined, and equations and loops that no result needs are gone.

    Attributes:
      loops: in the order in which they are written, which is one of their data.
      outside: the equations before the first loop, between each two loops, and after the last one; of a
        function without a loop, all. The compiler may move them.
      out_shape: the result as a pytree of ``ShapeDtypeStruct``.
      argument_leaves, result_leaves: what the arguments and results are parts of, in order.
      carried_leaves: pairs of an argument leaf's and a result leaf's position that a training loop will
        connect.
      carried_state: the same of arguments and results, where leaves are in the same parts.
      typed: the specs of variables, outside and inside the loop, whose types said how they are sharded, as
        types do along explicit mesh axes. The types of these variables no longer do.
    """

    arguments: tuple[Argument, ...]
    constants: tuple[Constant, ...]
    loops: tuple[Loop, ...]
    outside: tuple[tuple[JaxprEqn, ...], ...]
    results: tuple[Result, ...]
    out_shape: Any
    argument_leaves: tuple[Leaf, ...]
    result_leaves: tuple[Leaf, ...]
    carried_leaves: tuple[tuple[int, int], ...]
    carried_state: tuple[tuple[int, int], ...]
    typed: Mapping[Var, Spec] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        names = self.names()
        lines = self.argument_lines(names)
        for place, eqns in enumerate(self.outside):
            if place:
                lines += self._loop_lines(self.loops[place - 1], names)
            lines += [self.place_text(place), *indented(map(names.equation, eqns))]
        return "\n".join([*lines, "results", *indented(self.result_lines(names))])

    def loop_of(self, stage: int) -> int:
        """The number of the loop that a stage is of."""
        return next(number for number, loop in enumerate(self.loops) if stage in loop.stages)

    def place_text(self, place: int) -> str:
        """What is said of the equations outside of loops that come after so many of them."""
        if not self.loops:
            return "without a loop"
        which = "the loop" if len(self.loops) == 1 else "all loops"
        if 0 < place < len(self.loops):
            return f"between loop {place - 1} and loop {place}"
        return f"{'after' if place else 'before'} {which}"

    def _loop_lines(self, loop: Loop, names: Names) -> list[str]:
        number = f" {self.loop_of(loop.first_stage)}" if len(self.loops) > 1 else ""
        lines = [f"loop{number} over {loop.num_microbatches} microbatches, {loop.schedule}"]
        for eqn in loop.eqns:
            mark = mark_of(eqn)
            lines.append(f"  {names.equation(eqn)}" + (f"    # {mark.boundary}" if mark else ""))
        for result in loop.results:
            update = "+=" if result.state is None else f"from {names.of(result.state)} to"
            start = f"{names.typed(result.result)} starts as {names.of(result.initial)}"
            lines.append(f"  {start}, {update} {names.of(result.value)}")
        return lines

    def names(self) -> Names:
        """The names of the variables that are the same at every level."""
        given = {argument.var: argument.path for argument in self.arguments}
        given |= {constant.var: f"constant_{i}" for i, constant in enumerate(self.constants)}
        return Names({**given, **{loop.index: "index" for loop in self.loops}})

    def argument_lines(self, names: Names) -> list[str]:
        """What the step reads, as text."""
        lines = ["arguments", *indented(names.typed(argument.var) for argument in self.arguments)]
        if self.constants:
            lines += ["constants", *indented(names.typed(constant.var) for constant in self.constants)]
        return lines

    def result_lines(self, names: Names) -> list[str]:
        """What the step returns, as text."""
        updated = {result: argument for argument, result in self.carried_state}
        lines = []
        for i, result in enumerate(self.results):
            takes = f"    # the next {self.arguments[updated[i]].path}" if i in updated else ""
            lines.append(f"result{result.path} = {names.of(result.var)}{takes}")
        return lines


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


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """State that one work updates in every microbatch.

    Attributes:
      work: the work whose equations turn ``state`` into ``updated``.
      initial: the outer value it starts from, which nothing else reads.
      result: the outer variable of its value after the last microbatch.
      ordered, carried: those of the loop's result.
    """

    work: TaskType
    state: Var
    updated: Var
    initial: Var
    result: Var
    ordered: bool
    carried: bool = False


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """A step cut into work.

    Attributes:
      outer: all equations outside of loops, in order; those that read an accumulator's result come after
        its loop, the others may come before it.
      stage_work: the work of the loops, loop by loop in the order in which one microbatch passes through it.
        Its equations read outer variables directly.
      tasks: for each loop what each group of its schedule runs, first to last; it has been checked.
    """

    traced: TracedStep
    outer: tuple[JaxprEqn, ...]
    stage_work: tuple[StageWork, ...]
    accumulators: tuple[Accumulator, ...]
    tasks: tuple[tuple[tuple[Cell, ...], ...], ...]

    def __str__(self) -> str:
        return "\n".join(self.lines(self.traced.names()))

    def lines(self, names: Names) -> list[str]:
        """The graph as text."""
        lines = [*self.traced.argument_lines(names), "outside the loop"]
        lines += indented(map(names.equation, self.outer))
        lines += [*self.work_lines(names), "results"]
        return [*lines, *indented(self.traced.result_lines(names))]

    def work_lines(self, names: Names) -> list[str]:
        """The work of the loop, and what groups run, as text."""
        lines = []
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
        return lines


@dataclasses.dataclass(frozen=True)
class ShardedGraph:
    """A task graph with how values are sharded within a group.

    Attributes:
      specs: how outer variables and accumulators are sharded, as far as that is known. The accumulator of
        partial sums has one dimension more than the sum, the first one, in which the parts are.
      gathered: for each gathered copy that tasks read, the sharded value that an equation before the loop
        makes it of.
    """

    graph: TaskGraph
    specs: Mapping[Var, Spec]
    gathered: Mapping[Var, Var]

    def __str__(self) -> str:
        graph, names = self.graph, self.graph.traced.names()
        lines = [*graph.lines(names), "sharded within a group"]
        shown = (*(a.var for a in graph.traced.arguments), *(a.result for a in graph.accumulators))
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

    ``place`` is the number of loops that run before it; ``levels`` has, for each group that runs it, how many
    exchanges between groups come before it, from the last of these loops on.
    """

    eqn: JaxprEqn
    levels: Mapping[int, int]
    place: int


@dataclasses.dataclass(frozen=True)
class PlacedGraph:
    """A task graph with a place for everything.

    Attributes:
      mpmd_dim: the number of groups.
      stage_groups: the group of each stage.
      eqns: the outer equations in order.
      homes: for each outer variable (argument, constant, equation or accumulator result) the groups that
        have it without receiving it from another one in this step.
      output_groups: for each result, the groups that hold it after the step.
      specs: how outer variables and accumulators are sharded within a group, as far as that is known.
    """

    graph: TaskGraph
    mpmd_dim: int
    stage_groups: tuple[int, ...]
    eqns: tuple[PlacedEqn, ...]
    homes: Mapping[Var, GroupSet]
    output_groups: tuple[GroupSet, ...]
    specs: Mapping[Var, Spec]

    def __str__(self) -> str:
        traced = self.graph.traced
        names = traced.names()
        lines = [f"stage {stage} is on group {group}" for stage, group in enumerate(self.stage_groups)]
        lines.append("arguments and constants")
        for var in (*(a.var for a in traced.arguments), *(c.var for c in traced.constants)):
            sharded = f", sharded {spec}" if (spec := self.specs.get(var)) else ""
            lines.append(f"  {names.typed(var)} on {groups_text(self.homes[var])}{sharded}")
        for place in range(len(traced.outside)):
            if place:
                lines += self._accumulator_lines(names, place - 1)
            lines += [traced.place_text(place), *self._outside_lines(names, place)]
        lines.append("results")
        for line, groups in zip(traced.result_lines(names), self.output_groups, strict=True):
            lines.append(f"  on {groups_text(groups)}: {line}")
        return "\n".join(lines)

    def _accumulator_lines(self, names: Names, loop: int) -> list[str]:
        traced = self.graph.traced
        lines = [f"accumulated in {'the loop' if len(traced.loops) == 1 else f'loop {loop}'}"]
        for accumulator in self.graph.accumulators:
            if traced.loop_of(stage := accumulator.work.stage) == loop:
                by = f"{accumulator.work} on {self.stage_groups[stage]}"
                lines.append(f"  {names.typed(accumulator.result)} by {by}")
        return lines

    def _outside_lines(self, names: Names, place: int) -> list[str]:
        return [
            f"  {names.equation(placed.eqn)}    # {levels_text(placed.levels)}"
            for placed in self.eqns
            if placed.place == place
        ]
