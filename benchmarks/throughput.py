"""Compute-bound steps: tokens per second, and their share of the most that the measured tasks allow."""

from __future__ import annotations

import statistics

from benchmarks.comparison import Comparison, compare
from benchmarks.frame import Limited, Row, Rows, Setup
from benchmarks.peers import PIPELINED
from benchmarks.workload import Workload, small
from mpmd.simulate import Costs, simulate

SHARE_OF_BOUND, OF_FASTEST_PEER = 0.9, 1.0


def run(setup: Setup) -> Rows:
    cases = [small(2, 8), small(4, 8)]
    if setup.options.device and not setup.quick:
        cases = [Workload(groups, 8, 8, d_model=768, heads=12, seq_len=512, batch=16) for groups in (2, 4)]
    for case in setup.cases(cases, cases[:1]):
        compared = compare(case, setup)
        for peer, times in compared.by_name().items():
            yield "Throughput", row(case, peer, [case.tokens / seconds for seconds in times])
        bound = seconds_of_bound(compared, setup.cores)
        yield "Throughput", row(case, "the bound", [case.tokens / bound])
        if "on_ray" in compared.seconds:
            yield "Throughput: ratios", ratios(compared, bound)


def row(case: Workload, peer: str, rate: list[float]) -> Row:
    return {"compute-bound": str(case), "peer": peer, "tokens/s": rate}


def ratios(compared: Comparison, bound: float) -> Row:
    share = statistics.median(bound / seconds for seconds in compared.seconds["on_ray"])
    cells = {
        "on_ray, of the bound": Limited(share, SHARE_OF_BOUND, at_least=True),
        "on_ray, difference of losses from the first peer": compared.loss_difference("on_ray"),
    }
    if others := [key for key in PIPELINED if key in compared.seconds]:
        fastest = min(others, key=compared.median)
        cells[f"on_ray / {fastest}, the fastest peer"] = Limited(
            compared.ratio("on_ray", fastest), OF_FASTEST_PEER
        )
    return {"compute-bound": str(compared.workload), **cells}


def seconds_of_bound(compared: Comparison, cores: int) -> float:
    """The seconds of a step that no schedule of the measured tasks can beat here.

    The longer of two times: simulated, with a core for each group and free messages; and the work of all
    tasks, spread evenly over the cores. Both count as many steps in a row as were timed on Ray.
    """
    steps = compared.steps.get("on_ray", 1)
    simulated = simulate(compared.plan, Costs.measured(compared.events), steps=steps)
    return max(simulated.makespan, sum(simulated.busy) / cores) / steps
