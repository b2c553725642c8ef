"""Large plans, and the driver's time for a step, whatever the groups have to do."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import optax

import mpmd
from benchmarks import chain
from benchmarks.frame import Limited, Rows, Setup, in_process_mesh, interleaved, ratio, scaled
from benchmarks.host import Host
from mpmd.compiler.pipeline import compile_step
from mpmd.compiler.request import CompileRequest
from mpmd.verify import verify

PLANS = {(16, 64): 3, (32, 128): 3, (64, 512): 1}
"""The number of groups and of microbatches, and how often to plan for them."""

SECONDS_OF_LARGEST_PLAN, GROWTH = 5.0, 1.2
MICROBATCHES = (4, 32, 128, 512)
STEPS_IN_A_ROW = 10
WIDTH, OPTIMIZER = 8, optax.sgd(0.01)


class Planner:
    """Plans steps without running them; made in a process of its own, by ``Host``."""

    def plan(self, groups: int, microbatches: int) -> tuple[float, float, int]:
        """Returns the seconds to plan and verify, to verify, and the number of instructions."""
        submeshes = in_process_mesh(groups).abstract_submeshes
        args = chain.initial_state(groups, WIDTH, OPTIMIZER), *chain.batch(microbatches, 1, WIDTH)
        donated = [True] * groups + [False] * 2
        step = chain.train_step(groups, optimizer=OPTIMIZER)
        jax.clear_caches()
        start = time.perf_counter()
        compiled = compile_step(CompileRequest(step, args, {}, submeshes=submeshes, donated=donated))
        plan = compiled.program.plan
        planned = time.perf_counter()
        verify(plan)
        verified = time.perf_counter()
        instructions = sum(len(program.instructions) for program in plan.programs)
        return verified - start, verified - planned, instructions


class Driver:
    """A loaded step for each number of microbatches, of the same batch; made by ``Host``."""

    def __init__(self, groups: int, setup: Setup, on_ray: bool):
        self._mesh = setup.launch({"stage": groups}, "stage") if on_ray else in_process_mesh(groups)
        step = mpmd.jit(chain.train_step(groups, optimizer=OPTIMIZER), self._mesh, donate_argnums=0)
        self._loaded: dict[int, Any] = {}
        for count in MICROBATCHES:
            state = chain.initial_state(groups, WIDTH, OPTIMIZER)
            batch = chain.batch(count, max(MICROBATCHES) // count, WIDTH)
            self._loaded[count] = step.compile(state, *batch), state, batch
            self.call_seconds(count)

    def call_seconds(self, microbatches: int) -> float:
        """Seconds for which a call of the step keeps its thread busy: a mean over steps in a row."""
        step, state, batch = self._loaded[microbatches]
        start = time.thread_time()
        for _ in range(STEPS_IN_A_ROW):
            state, _ = step(state, *batch)
        seconds = (time.thread_time() - start) / STEPS_IN_A_ROW
        self._loaded[microbatches] = step, jax.block_until_ready(state), batch
        return seconds

    def close(self) -> None:
        self._mesh.close()


def run(setup: Setup) -> Rows:
    plans = setup.cases(list(PLANS), list(PLANS)[:1])
    most = max(groups for groups, _ in plans)
    with Host("benchmarks.scale:Planner", (), setup.environment(most, 1)) as host:
        host.call("plan", *min(plans))  # the first one imports
        for size in plans:
            repeated = [host.call("plan", *size) for _ in range(PLANS[size])]
            seconds, to_verify, instructions = zip(*repeated, strict=True)
            yield (
                "Planning",
                {
                    "": "{} groups, {} microbatches".format(*size),
                    "instructions": instructions[0],
                    "plan and verify, s": Limited(min(seconds), SECONDS_OF_LARGEST_PLAN),
                    "verify, s": to_verify,
                },
            )
    drivers = [(groups, on_ray) for groups in (2, 4) for on_ray in (False, True)]
    for groups, on_ray in setup.cases(drivers, drivers[:2]):
        if on_ray:
            setup.join_ray()
        environment = setup.environment(1 if on_ray else groups, 1)
        with Host("benchmarks.scale:Driver", (groups, setup, on_ray), environment) as host:
            calls = {
                str(count): functools.partial(host.call, "call_seconds", count) for count in MICROBATCHES
            }
            times = interleaved(calls, setup.repetitions)
        few, many = str(min(MICROBATCHES)), str(max(MICROBATCHES))
        yield (
            "The driver's time, us of a step by microbatches",
            {
                "": f"{groups} groups {'on Ray' if on_ray else 'in process'}",
                **{count: scaled(seconds, 1e6) for count, seconds in times.items()},
                f"{many} / {few}": Limited(ratio(times[many], times[few]), GROWTH),
            },
        )
