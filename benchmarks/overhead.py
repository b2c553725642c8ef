"""Tiny tasks: the cost of a step and of a task when there is next to nothing to compute."""

from __future__ import annotations

from benchmarks.comparison import compare
from benchmarks.frame import Limited, Rows, Setup
from benchmarks.workload import tiny

LIMITS = {
    ("on_ray", "seq"): 1.0,
    ("on_ray", "torch"): 0.5,
    ("on_ray", "ray_calls"): 0.5,
    ("on_ray", "ray_graph"): 0.5,
    ("in_process", "thr"): 1.0,
}
"""The most that the first peer should take of the second one's time."""


def run(setup: Setup) -> Rows:
    cases = [tiny(*size) for size in ((2, 8), (2, 32), (4, 8), (4, 32))]
    for case in setup.cases(cases, cases[:1]):
        compared = compare(case, setup)
        for peer, times in compared.by_name().items():
            yield (
                "Overhead",
                {
                    "tiny tasks": str(case),
                    "peer": peer,
                    "ms of a step": [1e3 * seconds for seconds in times],
                    "us per task": [1e6 * seconds / compared.tasks for seconds in times],
                },
            )
        ratios = {
            f"{ours} / {other}": Limited(compared.ratio(ours, other), limit)
            for (ours, other), limit in LIMITS.items()
            if {ours, other} <= set(compared.seconds)
        }
        yield "Overhead: ratios", {"tiny tasks": str(case), **ratios}
