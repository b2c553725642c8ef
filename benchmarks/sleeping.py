"""Simulated devices: tasks that sleep, so that many groups fit on few cores, against the simulator.

A task takes a given time, of which nothing is spent on a core; all that happens between tasks is what
training uses. The simulator has free messages, and tasks that take either just this time, or what they were
measured to take in the same steps: the system lets them sleep a bit longer, as no device would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ray

import mpmd
from benchmarks import tiny
from benchmarks.host import Host
from benchmarks.measure import Conditions, Result, Table, Target, Times
from benchmarks.peers import cpu_environment
from mpmd.ir.events import Event
from mpmd.ir.plan import Cell, GroupProgram, Task, TaskKind
from mpmd.runtime import worker
from mpmd.simulate import Costs, simulate

TASK_SECONDS = 0.01
ON_RAY = ((4, 32), (8, 8), (16, 32))
IN_PROCESS = ((8, 8),)
QUICK = ((8, 8),)
TARGET_GROUPS = 8
LEAST_REPETITIONS = 7


def sleep_in_tasks(seconds_of: Callable[[Task], float]) -> None:
    """From now on, the tasks of programs that this process loads take so many seconds.

    On a group, tasks with equal executables have to take equally long.

    What runs before and after the loop takes the time it takes.
    """

    class SleepingExecutor(worker.Executor):
        def __init__(self, program: GroupProgram, plan, executables, **others):
            durations = {
                run.executable: sum(map(seconds_of, run.task.tasks))
                for run in program.runs
                if isinstance(run.task, Cell)
            }
            slow = {name: _lasting(executables[name], length) for name, length in durations.items()}
            super().__init__(program, plan, {**executables, **slow}, **others)

    worker.Executor = SleepingExecutor  # type: ignore[misc, assignment]


def _lasting(call: Callable, seconds: float) -> Callable:
    def lasting(*arguments):
        end = time.perf_counter() + seconds
        results = jax.block_until_ready(call(*arguments))
        time.sleep(max(0.0, end - time.perf_counter()))
        return results

    return lasting


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline of sleeping tasks.

    Attributes:
      slices: of each microbatch, in Seq1F1B; 0 for 1F1B of whole microbatches.
      forward, backward: the seconds of such tasks.
    """

    groups: int
    microbatches: int
    on_ray: bool
    slices: int = 0
    forward: float = TASK_SECONDS
    backward: float = TASK_SECONDS

    @property
    def seconds(self) -> dict[TaskKind, float]:
        """The seconds of tasks by their kind."""
        return {"fwd": self.forward, "bwd": self.backward}

    def __str__(self) -> str:
        where = "on Ray" if self.on_ray else "in process"
        slices = f", {self.slices} slices" if self.slices else ""
        return f"{self.groups} groups, {self.microbatches} microbatches{slices}, {where}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Seconds of the loop of a step, from the start of its first task to the end of its last one.

    Attributes:
      nominal: that the simulator says if tasks take the seconds of the case.
      simulated: that it says if they take what they were measured to take.
      measured: of each step.
    """

    nominal: float
    simulated: float
    measured: Times

    @property
    def median(self) -> float:
        return statistics.median(self.measured)


class SleepingPipeline:
    """A pipeline of tiny stages whose tasks sleep; made in a process of its own, by ``Host``."""

    def __init__(self, case: Case, ray_address: str):
        seconds = case.seconds
        sleep_in_tasks(lambda task: seconds[task.kind])
        hook = {
            "worker_process_setup_hook": lambda: sleep_in_tasks(lambda task: seconds[task.kind]),
            "env_vars": {"PYTHONPATH": str(pathlib.Path(__file__).parents[1])},  # to find this file
        }
        self._mesh = tiny.open_mesh(case.groups, ray_address if case.on_ray else "", runtime_env=hook)
        rows = case.microbatches * max(1, case.slices)
        arguments: Any = tiny.arguments(case.groups, case.microbatches, rows)
        self._params, self._xs = arguments
        train_step = (
            tiny.sliced_train_step(case.groups, case.slices) if case.slices else tiny.train_step(case.groups)
        )
        self._costs = Costs(kinds=seconds)
        step = mpmd.jit(train_step, self._mesh, donate_argnums=0)
        self._step = step.compile(self._params, self._xs)

    def measure(self, repetitions: int) -> Measurement:
        """Runs so many steps, each when the one before has ended, and simulates them."""
        self._loop_events()  # the first step is slower
        steps = [self._loop_events() for _ in range(repetitions)]
        measured = Costs.measured(event for events in steps for event in events)
        return Measurement(
            simulate(self._step.plan, self._costs).makespan,
            simulate(self._step.plan, measured).makespan,
            tuple(_makespan(events) for events in steps),
        )

    def _loop_events(self) -> list[Event]:
        """The tasks of the loop, of one step."""
        (self._params, _), events = self._step.profile(self._params, self._xs)
        return [event for event in events if isinstance(event.activity, Cell)]

    def close(self) -> None:
        self._mesh.close()
        ray.shutdown()


def _makespan(events: Sequence[Event]) -> float:
    return max(event.end for event in events) - min(event.start for event in events)


def run(conditions: Conditions) -> Result:
    in_process, on_ray = (QUICK, QUICK) if conditions.quick else (IN_PROCESS, ON_RAY)
    cases = [Case(*size, on_ray=False) for size in in_process] + [Case(*size, on_ray=True) for size in on_ray]
    found = {case: measure(case, conditions) for case in cases}
    targets = [
        Target(f"tasks of 10 ms, {case}: measured / simulated", of_case.median / of_case.simulated, 1.05)
        for case, of_case in found.items()
        if case.on_ray and case.groups == TARGET_GROUPS
    ]
    data = [dataclasses.asdict(case) | dataclasses.asdict(of_case) for case, of_case in found.items()]
    header = (
        "ms of the loop, tasks that sleep",
        "simulated at 10 ms",
        "simulated as measured",
        "measured",
        "ratio to 10 ms",
        "ratio to as measured",
    )
    rows = tuple(row(case, of_case) for case, of_case in found.items())
    return Result([Table("Pipeline efficiency", header, rows)], targets, data)


def row(case: Case, found: Measurement) -> tuple[str, ...]:
    times = (found.nominal, found.simulated, found.median)
    ratios = (found.median / found.nominal, found.median / found.simulated)
    return str(case), *(f"{time * 1e3:.1f}" for time in times), *(f"{ratio:.3f}" for ratio in ratios)


def measure(case: Case, conditions: Conditions) -> Measurement:
    environment = cpu_environment(1 if case.on_ray else case.groups, 1)
    host = Host("benchmarks.sleeping:SleepingPipeline", (case, conditions.ray_address), environment)
    with contextlib.closing(host):
        host.ready()
        return host.call("measure", max(LEAST_REPETITIONS, conditions.effort.repetitions))
