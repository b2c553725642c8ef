"""The best candidates of choices and plans by hand, each of them run; for ``benchmarks.choices``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

import mpmd
from benchmarks.measure import Times, interleaved
from benchmarks.planned_models import Model, balanced, equal_layers
from benchmarks.running_steps import RunningStep
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.planner.candidate import Candidate
from mpmd.planner.choice import Choice
from mpmd.planner.choice_table import candidate_text
from mpmd.planner.trials.realize import decisions_of
from mpmd.planner.trials.trials import StepSpec, Trials

SLOWER = 1.5
"""Alternatives to a pipeline run if their predicted time is at most so many times that of the choice."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a step, with its seconds.

    Attributes:
      predicted: in the tables of the choices that have it, by the source of their numbers.
      chosen_by: the sources by whose numbers it is chosen.
      run: each measurement, of several steps in a row.
    """

    text: str
    predicted: Mapping[str, float]
    chosen_by: tuple[str, ...]
    run: Times


@dataclasses.dataclass(frozen=True)
class HandMade:
    """A plan by hand: stages of a schedule."""

    cut: str
    layers_per_stage: tuple[int, ...]
    schedule: mpmd.Schedule
    microbatches: int

    def __str__(self) -> str:
        layers = " ".join(map(str, self.layers_per_stage))
        return f"by hand: {self.schedule.name}, {self.cut} ({layers}), {self.microbatches} microbatches"


def made_by_hand(model: Model, groups: int) -> list[HandMade]:
    """The plans of an engineer who knows the layers, their parameters and their operations."""
    equal = equal_layers(len(model.layers), groups)
    by_parameters, by_work = balanced(model.parameters(), groups), balanced(model.work(), groups)
    plans = [
        HandMade("equal layers", equal, mpmd.Std1F1B(groups), 2 * groups),
        HandMade("equal layers", equal, mpmd.GPipe(groups), 2 * groups),
        HandMade("equal layers", equal, mpmd.ZeroBubble(groups), 4 * groups),
        HandMade("by parameters", by_parameters, mpmd.Std1F1B(groups), 4 * groups),
        HandMade("by work", by_work, mpmd.Std1F1B(groups), 2 * groups),
        HandMade("by work", by_work, mpmd.Std1F1B(groups), 4 * groups),
        HandMade("by work", by_work, mpmd.ZeroBubble(groups), 4 * groups),
    ]
    keys = [(plan.layers_per_stage, plan.schedule, plan.microbatches) for plan in plans]
    return [plan for number, plan in enumerate(plans) if keys[number] not in keys[:number]]


@dataclasses.dataclass(frozen=True)
class RankingCase:
    """A model, and how many of the best rows of each table run.

    Attributes:
      simulate: the number of candidates that a choice plans.
      measure: of how many rows the tasks are measured, by the source of a table's numbers.
    """

    model: Model
    shown: int
    simulate: int
    measure: Mapping[str, int]


def ranked(
    case: RankingCase, cluster: mpmd.Cluster, mesh: GroupMesh, anywhere: bool, repetitions: int
) -> list[Way]:
    """Chooses by each source, and runs the first rows of the tables and the plans by hand, in turns.

    Args:
      mesh: groups of one device each, of all devices of the cluster.
      anywhere: whether candidates may have other groups, which are then made of this process's devices.
    """
    model = case.model
    args = (jax.eval_shape(model.state), *model.batch())
    fixes: Mapping[str, Any] = {} if anywhere else {"groups": mesh.mpmd_dim, "submesh": {"data": 1}}
    choices = {
        source: mpmd.plan(
            model.open_step, *args, cluster=cluster, simulate=case.simulate, measure=measure, **fixes
        )
        for source, measure in case.measure.items()
    }
    trials = Trials(StepSpec.of(model.open_step, args, {}, None, None, (), (), None), cluster)
    candidates = _candidates(choices, case.shown)
    plans = made_by_hand(model, mesh.mpmd_dim)
    with contextlib.ExitStack() as meshes:
        running = []
        for candidate, choice in candidates.items():
            chosen = dataclasses.replace(
                choice,
                rows=tuple(row for row in choice.rows if row.candidate == candidate),
                decisions=decisions_of(candidate, trials.profiles),
                in_shardings=trials.shardings(candidate)[0],
            )
            groups = meshes.enter_context(chosen.mesh()) if anywhere else mesh
            running.append(RunningStep(chosen.jit(groups).compile(*args), model.state, *args[1:]))
        for plan in plans:
            step = model.scheduled_step(plan.layers_per_stage, plan.schedule)
            batch = model.microbatches(plan.microbatches)
            compiled = mpmd.jit(step, mesh, donate_argnums=0).compile(args[0], *batch)
            running.append(RunningStep(compiled, model.state, *batch))
        for step in running:
            step.seconds()  # the first steps are slower
        times = interleaved({str(i): step.seconds for i, step in enumerate(running)}, repetitions)
    return [
        *(_way(candidate, choices, times[str(i)]) for i, candidate in enumerate(candidates)),
        *(Way(str(plan), {}, (), times[str(i)]) for i, plan in enumerate(plans, len(candidates))),
    ]


def _candidates(choices: Mapping[str, Choice], shown: int) -> dict[Candidate, Choice]:
    """The candidates that run, each with a choice that has it: the first rows, and the alternatives."""
    candidates: dict[Candidate, Choice] = {}
    for choice in choices.values():
        limit = SLOWER * choice.best.prediction.seconds
        for number, row in enumerate(choice.rows):
            is_near = row.prediction.seconds <= limit and row.prediction.source != "formula"
            if number < shown or (row.label and is_near):
                candidates.setdefault(row.candidate, choice)
    return candidates


def _way(candidate: Candidate, choices: Mapping[str, Choice], run: Times) -> Way:
    rows = {
        source: next((row for row in choice.rows if row.candidate == candidate), None)
        for source, choice in choices.items()
    }
    return Way(
        candidate_text(candidate),
        {source: row.prediction.seconds for source, row in rows.items() if row},
        tuple(source for source, choice in choices.items() if choice.candidate == candidate),
        run,
    )
