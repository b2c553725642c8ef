"""The cost of ``mpmd.metrics`` for a tiny step, as a part of that step, both measured in one run.

The difference between steps with and without metrics is smaller than the noise of a machine. So the work
that metrics add to a step is measured by itself, many times in a row, and divided by the duration of a step,
each the fastest of some turns; the steps with and without metrics are shown beside it.

    python -m benchmarks.metrics
    python -m benchmarks.metrics --ray local
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

GROUPS, MICROBATCHES = 2, 8
STEPS_IN_A_ROW, TURNS = 50, 20
CALLS = 1_000
MOST = 0.005
"""Of a step."""

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(GROUPS))

import jax  # noqa: E402

import mpmd  # noqa: E402
from benchmarks.tiny import arguments, open_mesh, train_step  # noqa: E402


class Written:
    """A ``write`` that keeps the last metrics."""

    def __init__(self) -> None:
        self.count, self.last = 0, dict[str, float]()

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        self.count += 1
        self.last = dict(values)


def step_seconds(step: Any, state: Any, xs: Any) -> float:
    """The duration of a step, of several that are under way at once."""
    start = time.perf_counter()
    for _ in range(STEPS_IN_A_ROW):
        state, _ = step(state, xs)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / STEPS_IN_A_ROW


def added_seconds(step: Any) -> float:
    """The time that counting and metrics add to a step: all that is called for one, without the step."""
    meter = step.meter
    start = time.perf_counter()
    for _ in range(CALLS):
        meter.check()
        meter.asks_for_memory()
        end = meter.begin(lambda: 1)
        meter.hand_over()
        end(False)
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", default="", metavar="ADDRESS", help="run on actors: `local`, or an address")
    options = parser.parse_args()
    state, xs = arguments(GROUPS, MICROBATCHES, MICROBATCHES)
    with open_mesh(GROUPS, options.ray) as mesh:
        step = mpmd.jit(train_step(GROUPS), mesh)
        without, watched = [step_seconds(step, state, xs)], []
        for _ in range(TURNS):
            without.append(step_seconds(step, state, xs))
            with mpmd.metrics(step, Written(), examples=8, tokens=64):
                watched.append(step_seconds(step, state, xs))
        counting = min(added_seconds(step) for _ in range(TURNS))
        with mpmd.metrics(step, Written(), examples=8, tokens=64):
            added = min(added_seconds(step) for _ in range(TURNS))
    tiny = min(without)
    print(f"a tiny step, {GROUPS} groups, {MICROBATCHES} microbatches: {_text(without)}")
    print(f"the step with metrics of every step:      {_text(watched)}")
    print(f"counting steps, always, by itself:        {_part(counting, tiny)}")
    print(f"the same with metrics of every step:      {_part(added, tiny)}")
    print("OK" if added < MOST * tiny else f"more than {MOST:.1%}")


def _part(added: float, step: float) -> str:
    return f"{added * 1e6:.1f} us, {added / step:.2%} of the step"


def _text(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e6:.0f} us; the median is {statistics.median(seconds) * 1e6:.0f} us"


if __name__ == "__main__":
    main()
