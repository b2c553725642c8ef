"""Steps that are predicted and then run, in a process of their own; for ``benchmarks.prediction``."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import ray

import cluster
import mpmd
from benchmarks.peers.ours import START_SECONDS
from benchmarks.planned_models import Model
from benchmarks.predicted_choices import RankingCase, Way, ranked
from benchmarks.running_steps import STEPS_IN_A_ROW, RunningStep
from benchmarks.sleeping import sleep_in_tasks
from mpmd.ir.plan import Plan, Task
from mpmd.ir.routes import Topology
from mpmd.language.decisions import Decisions
from mpmd.memory import Holding
from mpmd.planner.calibrate import calibrate
from mpmd.planner.candidate import Candidate
from mpmd.planner.hardware import Hardware, completed
from mpmd.planner.profiling import profile_step
from mpmd.planner.record_steps import record_steps
from mpmd.planner.shared_cores import of_step
from mpmd.planner.trials.predict import memories_of
from mpmd.planner.trials.realize import Realized, lower, measured, simulated
from mpmd.schedules import Schedule
from mpmd.simulate import Costs, simulate
from mpmd.step.loaded_step import LoadedStep

SLEEP_SECONDS = 0.01
MEASUREMENTS = 3
"""The number of measurements of the tasks of a step."""

RETURNED_BYTES = 2**18
"""The size from which on freed memory is given back to the system, so that it does not count any more."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is run.

    Attributes:
      layers: of each stage.
    """

    model: Model
    layers: tuple[int, ...]
    schedule: Schedule
    microbatches: int

    def step(self) -> Callable:
        """The train step."""
        return self.model.scheduled_step(self.layers, self.schedule)

    def arguments(self) -> tuple[Any, np.ndarray, np.ndarray]:
        """The arguments of a step: the state's shapes, and two batches of values, cut into microbatches."""
        return jax.eval_shape(self.model.state), *self.model.microbatches(self.microbatches)

    def __str__(self) -> str:
        name = type(self.schedule).__name__
        stages = " ".join(map(str, self.layers))
        return f"{self.model.name}, {name}, stages of {stages} layers, {self.microbatches} microbatches"


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step, of several that run in a row: predicted in several ways, and measured.

    Attributes:
      formula: by the work of the plan's equations.
      measured_tasks: by tasks that were measured, one after the other.
      run_tasks: by the times that the tasks took while the steps ran.
      run: each measurement.
    """

    formula: float
    measured_tasks: float
    run_tasks: float
    run: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.run)

    @property
    def spread(self) -> float:
        """The range of measurements of the same step, as a share of their median."""
        return (max(self.run) - min(self.run)) / self.median


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes of a group's device at the worst moment.

    Attributes:
      formula: as predicted from the plan alone.
      compiled: with XLA's temporaries, as it says them of executables that were compiled one by one.
      allocated: by the group's process, on top of what it had before.
    """

    group: int
    formula: float
    compiled: float
    allocated: float


class Groups:
    """Groups of one device each, in process or on Ray; made in a process of its own, by ``Host``."""

    def __init__(self, groups: int, ray_address: str, sleeps: Sequence[float] = (), gives_back: bool = False):
        """Opens the groups.

        Args:
          sleeps: by how much longer than ``SLEEP_SECONDS`` the tasks of a stage sleep, if they do.
          gives_back: whether actors give large buffers back to the system when they are freed. That makes
            tasks slower.
        """
        self._groups = groups
        of_ray = {}
        if sleeps:
            sleep_in_tasks(lambda task: sleep_seconds(task, sleeps))
            of_ray["runtime_env"] = {
                "worker_process_setup_hook": lambda: sleep_in_tasks(lambda task: sleep_seconds(task, sleeps)),
                "env_vars": {"PYTHONPATH": str(pathlib.Path(__file__).parents[1])},  # to find this file
            }
        if ray_address:
            ray.init(address=ray_address, log_to_driver=False, **of_ray)
            variables = {"env_vars": {"MALLOC_MMAP_THRESHOLD_": str(RETURNED_BYTES)}} if gives_back else {}
            self._mesh = cluster.launch(groups=[AXES] * groups, timeout=START_SECONDS, runtime_env=variables)
        else:
            meshes = [jax.sharding.Mesh(np.array([d]).reshape(1, 1, 1), tuple(AXES)) for d in jax.devices()]
            self._mesh = mpmd.MpmdMesh(meshes[:groups])

    @functools.cached_property
    def cluster(self) -> Hardware:
        """The devices, calibrated on the groups; with the collectives of those in process."""
        if isinstance(self._mesh, mpmd.MpmdMesh):
            return mpmd.Cluster.of_this_process(measure=True)
        sizes = {"nodes": 1, "devices_per_node": self._groups, "memory": 2.0**30, "holding": Holding.SLOTS}
        found = calibrate(functools.partial(record_steps, self._mesh), [0] * self._groups)
        return completed(sizes, {}, found.known)

    def described(self) -> str:
        """The calibrated speeds of the devices, as text."""
        found = self.cluster
        link = found.device_link
        return (
            f"{found.flops / 1e9:.0f} GFLOP/s, {found.memory_bandwidth / 1e9:.1f} GB/s, "
            f"{found.alone:.1f} times as fast alone, {found.task_overhead * 1e6:.0f} us a task, "
            f"links of {link.latency * 1e6:.0f} us and {link.bandwidth / 1e9:.1f} GB/s"
        )

    def _realize(self, case: Case) -> tuple[Realized, Callable[[], Realized]]:
        """The prediction from the equations, and a function that predicts from measured tasks."""
        candidate = Candidate(
            case.layers, ({"data": 1},) * self._groups, case.schedule, case.microbatches, False, False
        )
        lowered = lower(case.step(), candidate, Decisions(), case.arguments(), {}, (None, None), (0,))
        cluster = of_step(self.cluster, profile_step(case.step(), case.arguments(), {}).profiles)
        formula = simulated(lowered, candidate, cluster)
        return formula, lambda: measured(formula, candidate, cluster, None)

    def _compiled(self, case: Case) -> tuple[LoadedStep, Callable[[], Any], np.ndarray, np.ndarray]:
        """The arguments of a ``RunningStep``."""
        step = mpmd.jit(case.step(), self._mesh, donate_argnums=0)
        state, xs, ys = case.arguments()
        return step.compile(state, xs, ys), case.model.state, xs, ys

    def times(self, case: Case, repetitions: int) -> Times:
        """Predicts a case, and runs it and measures its tasks in turns."""
        formula, measure_tasks = self._realize(case)
        step = RunningStep(*self._compiled(case))
        step.seconds()  # the first steps are slower
        run, by_tasks, events = [], [], []
        for repetition in range(repetitions):
            if repetition < MEASUREMENTS:
                by_tasks.append(in_a_row(measure_tasks()))
            run.append(step.seconds())
            events += step.profile()
        return Times(
            formula=in_a_row(formula),
            measured_tasks=statistics.median(by_tasks),
            run_tasks=seconds_in_a_row(step.plan, Costs.measured(events), step.topology),
            run=tuple(run),
        )

    def sleeping(self, case: Case, sleeps: Sequence[float], repetitions: int) -> Times:
        """The same for tasks that sleep, whose times are known."""
        step = RunningStep(*self._compiled(case))
        kinds = {(run.task.kind, run.task.stage) for run in tasks_of(step.plan)}
        exact = Costs(tasks={key: sleep_seconds(Task(*key, 0), sleeps) for key in kinds})
        step.seconds()
        run = tuple(step.seconds() for _ in range(repetitions))
        predicted = seconds_in_a_row(step.plan, exact, step.topology)
        return Times(predicted, predicted, predicted, run)

    def ranked(self, case: RankingCase, repetitions: int) -> list[Way]:
        """Chooses for these groups, and runs the best rows and plans by hand."""
        anywhere = isinstance(self._mesh, mpmd.MpmdMesh)
        return ranked(case, self.cluster, self._mesh, anywhere, repetitions)

    def peaks(self, case: Case) -> list[Peak]:
        """The memory that processes of groups allocate for a step, once it is compiled."""
        formula, measure_tasks = self._realize(case)
        compiled = self._compiled(case)
        pids = [group.pid for group in self._mesh.groups]
        before = [resident(pid) for pid in pids]
        step = RunningStep(*compiled)
        for pid in pids:
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        step.seconds()
        allocated = [peak_resident(pid) - start for pid, start in zip(pids, before, strict=True)]
        of_tasks = peaks_of(measure_tasks(), self.cluster.holding)
        return [
            Peak(group, *of_group)
            for group, of_group in enumerate(
                zip(peaks_of(formula, self.cluster.holding), of_tasks, allocated, strict=True)
            )
        ]

    def close(self) -> None:
        """Ends the groups, and Ray's connection if there is one."""
        self._mesh.close()
        ray.shutdown()


AXES = {"data": 1, "sequence": 1, "model": 1}
"""The axes of a candidate's submesh."""


def sleep_seconds(task: Task, sleeps: Sequence[float]) -> float:
    """The seconds that a task sleeps: a backward twice as long as a forward, or as two halves."""
    return SLEEP_SECONDS * sleeps[task.stage] * (2 if task.kind == "bwd" else 1)


def tasks_of(plan: Plan) -> list[Any]:
    """The runs of the loop's tasks."""
    runs = (run for program in plan.programs for run in program.runs)
    return [run for run in runs if isinstance(run.task, Task)]


def in_a_row(realized: Realized) -> float:
    """The seconds of a step of a candidate, of several in a row."""
    return seconds_in_a_row(realized.plan, realized.costs, realized.step.topology)


def seconds_in_a_row(plan: Plan, costs: Costs, topology: Topology) -> float:
    simulation = simulate(plan, costs, steps=STEPS_IN_A_ROW, topology=topology)
    return simulation.makespan / STEPS_IN_A_ROW


def peaks_of(realized: Realized, holding: Holding) -> tuple[float, ...]:
    """The bytes of each group at its worst moment."""
    arrivals = realized.step.compiled.verified.arrivals
    memories = memories_of(realized.plan, arrivals, holding, ())
    return tuple(float(memory.peak_bytes) for memory in memories)


def resident(pid: int) -> int:
    """The bytes of memory that a process of this machine has."""
    return _status(pid, "VmRSS")


def peak_resident(pid: int) -> int:
    """The most that it has had."""
    return _status(pid, "VmHWM")


def _status(pid: int, what: str) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition(f"{what}:")[2].split()[0])
