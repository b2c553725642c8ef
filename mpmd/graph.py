"""What the passes of the compiler hand to one another; like the passes, these hold jaxpr equations.

Grammar, from the traced step to the one that is ready to be lowered::

    TracedStep   ::= jaxpr with one loop
    TaskGraph    ::= outer equations, StageWork per kind and stage, accumulators
    PlacedGraph  ::= TaskGraph with the groups of every outer value and equation
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.ir import Cell, TaskKind
from mpmd.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step as one jaxpr over flat arguments, with its loop laid bare.

    Attributes:
      jaxpr: the whole step; calls outside the loop are inlined, equations without use are gone.
      constants: the values of ``jaxpr.constvars``.
      loop: the one ``treduce`` equation of ``jaxpr``; marks occur in its body and nowhere deeper.
      in_paths, out_paths: what users call the arguments and results, e.g. ``args[0].params['w']``.
      out_shape: the result as a pytree of ``ShapeDtypeStruct``.
      fed_back: pairs of an argument's and a result's position that a training loop will connect: the state.
    """

    jaxpr: Jaxpr
    constants: Mapping[Var, Any]
    loop: JaxprEqn
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    out_shape: Any
    fed_back: tuple[tuple[int, int], ...]


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
      work: the work whose equations turn ``before`` into ``after``.
      initial: the outer value it starts from, which nothing else reads.
      result: the outer variable of its value after the last microbatch.
      ordered: whether the order of the microbatches may decide the result.
    """

    work: Work
    before: Var
    after: Var
    initial: Var
    result: Var
    ordered: bool


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """A step cut into work.

    Attributes:
      traced: the step.
      outer: all equations outside the loop, in order; those that read an accumulator's result come after
        the loop, the others may come before it.
      outputs: the step's results.
      stages: the work of the loop, in the order in which one microbatch passes through it. Its equations
        read outer variables directly.
      index: the variable of the microbatch index.
      tasks: what each group runs in the loop, first to last; it has been checked.
    """

    traced: TracedStep
    outer: tuple[JaxprEqn, ...]
    outputs: tuple[Var, ...]
    stages: tuple[StageWork, ...]
    accumulators: tuple[Accumulator, ...]
    index: Var
    num_stages: int
    num_microbatches: int
    schedule: Schedule
    tasks: tuple[tuple[Cell, ...], ...]


Groups = frozenset[int]
"""The groups that hold a value or run an equation."""


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
      stage_groups: the group of each stage.
      eqns: the outer equations in order.
      homes: for each outer variable (argument, constant, equation or accumulator result) the groups that
        have it without receiving it in this step.
      output_groups: for each result, the groups that hold it after the step.
    """

    graph: TaskGraph
    stage_groups: tuple[int, ...]
    eqns: tuple[PlacedEqn, ...]
    homes: Mapping[Var, Groups]
    output_groups: tuple[Groups, ...]
