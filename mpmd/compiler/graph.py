"""What the passes of the compiler hand to one another. Like the passes, these hold jaxpr equations.

Grammar, from the traced step to the one that is ready to be lowered::

    TracedStep   ::= argument* constant* (equation* Loop)? equation* result*
    Loop         ::= index equation* LoopResult*         the equations have marks among them
    TaskGraph    ::= TracedStep outer-equation* StageWork* Accumulator* task-list*   StageWork has no marks
    ShardedGraph ::= TaskGraph Spec-of-each-outer-value gathered-copy*
    PlacedGraph  ::= TaskGraph PlacedEqn* GroupSet-of-each-outer-value

``str()`` of each prints it, and ``checks.py`` says what holds of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jax.extend.core import JaxprEqn, Var

from mpmd.annotate import mark_of
from mpmd.compiler.jaxprs.equations import Atom
from mpmd.compiler.jaxprs.printing import Names, indented
from mpmd.ir import Cell, Spec, TaskKind
from mpmd.schedules import Schedule
from mpmd.stack import Leaf

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
    """The microbatch loop.

    Attributes:
      index: the variable of the microbatch index, an int32 scalar.
      eqns: the body for one microbatch. It reads outer variables directly. The boundary of each mark among
        the equations says which stage ends there.
    """

    index: Var
    eqns: tuple[JaxprEqn, ...]
    results: tuple[LoopResult, ...]
    num_microbatches: int
    schedule: Schedule

    @property
    def states(self) -> tuple[Var, ...]:
        """The variables of the states that are not plain sums."""
        return tuple(result.state for result in self.results if result.state is not None)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step over flat arguments: equations, its one loop, and equations.

    Calls outside the loop are inlined, and equations that no result needs are gone.

    Attributes:
      before, after: the equations that are written before and after the loop. The compiler may move them.
      loop: ``None`` for a function without one; its equations are those of ``after``.
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
    before: tuple[JaxprEqn, ...]
    loop: Loop | None
    after: tuple[JaxprEqn, ...]
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
        if self.loop is None:
            lines.append("without a loop")
        else:
            lines += ["before the loop", *indented(map(names.equation, self.before))]
            lines += [*self._loop_lines(self.loop, names), "after the loop"]
        lines += [*indented(map(names.equation, self.after)), "results"]
        return "\n".join([*lines, *indented(self.result_lines(names))])

    def _loop_lines(self, loop: Loop, names: Names) -> list[str]:
        lines = [f"loop over {loop.num_microbatches} microbatches, {loop.schedule}"]
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
        return Names({**given, self.loop.index: "index"} if self.loop else given)

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


@dataclasses.dataclass(frozen=True, order=True)
class Work:
    """A kind of task of a stage, for any microbatch.

    A stage's backward is either one ``bwd``, or a ``bwdA`` and a ``bwdW`` if the schedule has such tasks.
    """

    kind: TaskKind
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}_{self.stage}"


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The equations of a ``Work``.

    Attributes:
      reads: variables of outer values, of the microbatch index, of accumulator states and of other work.
      makes: variables that other work reads.
    """

    work: Work
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

    work: Work
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
      outer: all equations outside the loop, in order; those that read an accumulator's result come after
        the loop, the others may come before it.
      stage_work: the work of the loop, in the order in which one microbatch passes through it. Its
        equations read outer variables directly.
      tasks: what each group runs in the loop, first to last; it has been checked. Like the work and the
        accumulators, none if there is no loop.
    """

    traced: TracedStep
    outer: tuple[JaxprEqn, ...]
    stage_work: tuple[StageWork, ...]
    accumulators: tuple[Accumulator, ...]
    tasks: tuple[tuple[Cell, ...], ...]

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
        lines.append("tasks")
        return lines + [f"  group {i}: {' '.join(map(str, cells))}" for i, cells in enumerate(self.tasks)]


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

    ``after`` tells whether it runs after the loop; ``levels`` has, for each group that runs it, how many
    exchanges between groups come before it on its side of the loop.
    """

    eqn: JaxprEqn
    levels: Mapping[int, int]
    after: bool


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
            lines.append(f"  {names.typed(var)} on {_text(self.homes[var])}{sharded}")
        lines += ["before the loop", *self._outside_lines(names, after=False), "accumulated in the loop"]
        for accumulator in self.graph.accumulators:
            group = self.stage_groups[accumulator.work.stage]
            lines.append(f"  {names.typed(accumulator.result)} by {accumulator.work} on {group}")
        lines += ["after the loop", *self._outside_lines(names, after=True), "results"]
        for line, groups in zip(traced.result_lines(names), self.output_groups, strict=True):
            lines.append(f"  on {_text(groups)}: {line}")
        return "\n".join(lines)

    def _outside_lines(self, names: Names, after: bool) -> list[str]:
        return [
            f"  {names.equation(placed.eqn)}    # {_levels(placed.levels)}"
            for placed in self.eqns
            if placed.after == after
        ]


def _text(groups: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(groups))) or "no group"


def _levels(levels: Mapping[int, int]) -> str:
    by_level: dict[int, list[int]] = {}
    for group, level in sorted(levels.items()):
        by_level.setdefault(level, []).append(group)
    return "; ".join(f"level {level} on {_text(groups)}" for level, groups in sorted(by_level.items()))
