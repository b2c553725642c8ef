"""Groups on which steps are predicted and then run, in a process of their own; for ``benchmarks.planner``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ray

import mpmd
from benchmarks.frame import Limited, Row, Setup, interleaved, ratio, scaled
from benchmarks.planned_models import MODELS, HandMade, Model, by_hand, mlp
from mpmd.ir.plan import Plan, Task
from mpmd.ir.routes import Topology
from mpmd.memory import Holding
from mpmd.planner.calibrate import calibrate
from mpmd.planner.candidate import Candidate
from mpmd.planner.choice import Choice
from mpmd.planner.choice_table import candidate_text
from mpmd.planner.hardware import Hardware, completed
from mpmd.planner.record_steps import record_steps
from mpmd.planner.trials.realize import Realized, decisions_of, measured, simulated
from mpmd.planner.trials.trials import StepSpec, Trials
from mpmd.simulate import Costs, simulate
from mpmd.step.loaded_step import LoadedStep
from tests.support.sleeping_tasks import sleep_in_tasks

STEPS_IN_A_ROW = 3
SHOWN, SHOWN_QUICKLY, SIMULATED = 4, 2, 12
"""The best rows of a table that run, and the candidates that a choice plans, which saves half a minute."""

SLOWER = 1.5
"""Alternatives to a pipeline run if their predicted time is at most this factor of the choice's time."""

SLEEP_SECONDS = 0.01

SIMULATION, MEASUREMENT, OF_THE_RUN = "by simulation", "by measured tasks", "tasks of the run"
BARS = {SIMULATION: 1.10, MEASUREMENT: 1.05}
"""The most that a choice by these numbers may take, over the best way that ran."""


class RunningStep:
    """A step that runs several times in a row on the state that it returns."""

    def __init__(self, step: LoadedStep, init: Callable[[], Any], batch: tuple):
        self.plan, self.topology = step.plan, step.topology
        self._step, self._batch = step, batch
        self._state = jax.block_until_ready(step.init(init))

    def seconds(self) -> float:
        """Runs steps in a row; returns the seconds of one."""
        start = time.perf_counter()
        for _ in range(STEPS_IN_A_ROW):
            self._state, _ = self._step(self._state, *self._batch)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - start) / STEPS_IN_A_ROW

    def simulated_seconds(self) -> float:
        """The simulated seconds of a step whose tasks take the times of a profiled step."""
        (self._state, _), events = self._step.profile(self._state, *self._batch)
        return _seconds_in_a_row(self.plan, Costs.measured(events), self.topology)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a model's step.

    Attributes:
      predicted: seconds of a step, by the source of the numbers.
      chosen_by: the sources by whose numbers it is chosen.
    """

    text: str
    step: RunningStep
    predicted: Mapping[str, float]
    chosen_by: Sequence[str] = ()


class Groups:
    """Groups of one device each, in process or on Ray; made in a process of its own, by ``Host``.

    Args:
      setup: of the run, if the groups are on Ray.
      sleeps: factors of ``SLEEP_SECONDS`` for which the tasks of each stage sleep, if they do.
    """

    def __init__(self, groups: int, setup: Setup | None, sleeps: Sequence[float]):
        self._groups = groups
        axes = {"data": 1, "sequence": 1, "model": 1}  # those of a candidate's submesh
        if setup:
            self._mesh: Any = setup.launch(groups=[axes] * groups)
        else:
            devices = jax.devices()[:groups]
            self._mesh = mpmd.MpmdMesh([jax.make_mesh((1, 1, 1), tuple(axes), devices=[d]) for d in devices])
        if sleeps:
            begin = functools.partial(sleep_in_tasks, functools.partial(_sleep_seconds, sleeps))
            begin()
            actors = self._mesh.runtime.actors if setup else ()
            ray.get([actor.__ray_call__.remote(lambda _: begin()) for actor in actors])

    @functools.cached_property
    def cluster(self) -> Hardware:
        """The devices, calibrated on the groups; with the collectives of groups in process."""
        if isinstance(self._mesh, mpmd.MpmdMesh):
            return mpmd.Cluster.of_this_process(measure=True)
        sizes = {"nodes": 1, "devices_per_node": self._groups, "memory": 2.0**30, "holding": Holding.SLOTS}
        found = calibrate(functools.partial(record_steps, self._mesh), [0] * self._groups)
        return completed(sizes, {}, lambda: found)

    def calibrated(self) -> Row:
        """The calibrated speeds of the devices."""
        found = self.cluster
        return {
            "GFLOP/s": found.flops / 1e9,
            "GB/s": found.memory_bandwidth / 1e9,
            "times as fast alone": found.alone,
            "us of a task": found.task_overhead * 1e6,
            "link, us": found.device_link.latency * 1e6,
            "link, GB/s": found.device_link.bandwidth / 1e9,
        }

    def ways(self, name: str, quick: bool, repetitions: int) -> list[Row]:
        """Runs the first rows of the tables of ``mpmd.plan``, and plans by hand, in turns."""
        model = MODELS[name]()
        plans = by_hand(model, self._groups)[: 2 if quick else None]
        with contextlib.ExitStack() as meshes:
            ways = self._chosen(model, SHOWN_QUICKLY if quick else SHOWN, meshes)
            ways += [self._by_hand(model, plan) for plan in plans]
            for way in ways:
                way.step.seconds()  # the first steps are slower
            times = interleaved({str(i): way.step.seconds for i, way in enumerate(ways)}, repetitions)
            run_tasks = [way.step.simulated_seconds() for way in ways]
        rows = []
        for i, way in enumerate(ways):
            run = times[str(i)]
            predicted = dict(way.predicted) | {OF_THE_RUN: run_tasks[i]}
            over_best = max(ratio(run, other) for other in times.values())
            bar = min((BARS[source] for source in way.chosen_by), default=None)
            rows.append(
                {
                    "way": way.text,
                    "chosen": " and ".join(way.chosen_by),
                    "ms": scaled(run, 1e3),
                    **{
                        f"{source} / ms": predicted[source] / statistics.median(run)
                        if source in predicted
                        else ""
                        for source in (SIMULATION, MEASUREMENT, OF_THE_RUN)
                    },
                    "ms / best": Limited(over_best, bar) if bar else over_best,
                }
            )
        return rows

    def _chosen(self, model: Model, shown: int, meshes: contextlib.ExitStack) -> list[Way]:
        """The best candidates of choices; in process they may have other groups than this mesh."""
        anywhere = isinstance(self._mesh, mpmd.MpmdMesh)
        args = (jax.eval_shape(model.state), *model.batch())
        fixes: Mapping[str, Any] = {} if anywhere else {"groups": self._groups, "submesh": {"data": 1}}
        plan = functools.partial(
            mpmd.plan, model.open_step, *args, cluster=self.cluster, simulate=SIMULATED, **fixes
        )
        choices = {SIMULATION: plan(measure=0), MEASUREMENT: plan(measure=shown)}
        trials = Trials(StepSpec.of(model.open_step, args), self.cluster)
        ways = []
        for candidate, choice in _candidates(choices, shown).items():
            chosen = dataclasses.replace(
                choice,
                rows=tuple(row for row in choice.rows if row.candidate == candidate),
                decisions=decisions_of(candidate, trials.profiles),
                in_shardings=trials.shardings(candidate)[0],
            )
            mesh = meshes.enter_context(chosen.mesh()) if anywhere else self._mesh
            predicted = {
                source: row.prediction.seconds
                for source, each in choices.items()
                for row in each.rows
                if row.candidate == candidate
            }
            step = RunningStep(chosen.jit(mesh).compile(*args), model.state, args[1:])
            sources = [source for source, each in choices.items() if each.candidate == candidate]
            ways.append(Way(candidate_text(candidate), step, predicted, sources))
        return ways

    def _by_hand(self, model: Model, plan: HandMade) -> Way:
        step = model.scheduled_step(plan.layers_per_stage, plan.schedule)
        args = jax.eval_shape(model.state), *model.microbatches(plan.microbatches)
        submeshes = ({"data": 1},) * self._groups
        candidate = Candidate(
            plan.layers_per_stage, submeshes, plan.schedule, plan.microbatches, False, False
        )
        lowered = mpmd.jit(step, mpmd.AbstractMpmdMesh(submeshes), donate_argnums=0).lower(*args)
        formula = simulated(lowered, candidate, self.cluster)
        measure = measured(formula, candidate, self.cluster)
        predicted = {SIMULATION: _seconds(formula), MEASUREMENT: _seconds(measure)}
        return Way(str(plan), self._running(model, plan), predicted)

    def _running(self, model: Model, plan: HandMade) -> RunningStep:
        batch = model.microbatches(plan.microbatches)
        step = mpmd.jit(
            model.scheduled_step(plan.layers_per_stage, plan.schedule), self._mesh, donate_argnums=0
        )
        return RunningStep(step.compile(jax.eval_shape(model.state), *batch), model.state, batch)

    def sleeping(self, sleeps: Sequence[float]) -> list[Row]:
        """Runs steps of tasks that sleep, beside the simulator with exact times."""
        groups, rows = self._groups, []
        for schedule, microbatches in (
            (mpmd.Std1F1B(groups), 4),
            (mpmd.ZeroBubble(groups), 8),
            (mpmd.GPipe(groups), 8),
        ):
            plan = HandMade("one layer each", (1,) * groups, schedule, microbatches)
            step = self._running(mlp([8] * (groups + 1), rows=64), plan)
            kinds = {(task.kind, task.stage) for task in _tasks(step.plan)}
            exact = Costs(tasks={key: _sleep_seconds(sleeps, Task(*key, 0)) for key in kinds})
            step.seconds()  # the first steps are slower
            run = [step.seconds() for _ in range(2)]
            predicted = _seconds_in_a_row(step.plan, exact, step.topology)
            miss = abs(predicted / statistics.median(run) - 1)
            rows.append(
                {
                    "way": str(plan),
                    "ms": scaled(run, 1e3),
                    "simulated, ms": 1e3 * predicted,
                    "miss": Limited(miss, 0.1),
                }
            )
        return rows

    def close(self) -> None:
        self._mesh.close()


def _candidates(choices: Mapping[str, Choice], shown: int) -> dict[Candidate, Choice]:
    """The candidates to run, each with a choice that has it: the first rows, and near alternatives."""
    candidates: dict[Candidate, Choice] = {}
    for choice in choices.values():
        limit = SLOWER * choice.best.prediction.seconds
        for number, row in enumerate(choice.rows):
            is_near = row.prediction.seconds <= limit and row.prediction.source != "formula"
            if number < shown or (row.label and is_near):
                candidates.setdefault(row.candidate, choice)
    return candidates


def _sleep_seconds(sleeps: Sequence[float], task: Task) -> float:
    """The seconds that a task sleeps: a whole backward twice as long as a forward, or as two halves."""
    return SLEEP_SECONDS * sleeps[task.stage] * (2 if task.kind == "bwd" else 1)


def _tasks(plan: Plan) -> list[Task]:
    runs = (run for program in plan.programs for run in program.runs)
    return [run.task for run in runs if isinstance(run.task, Task)]


def _seconds(realized: Realized) -> float:
    return _seconds_in_a_row(realized.plan, realized.costs, realized.step.topology)


def _seconds_in_a_row(plan: Plan, costs: Costs, topology: Topology) -> float:
    """The simulated seconds of a step, of several in a row."""
    return simulate(plan, costs, steps=STEPS_IN_A_ROW, topology=topology).makespan / STEPS_IN_A_ROW
