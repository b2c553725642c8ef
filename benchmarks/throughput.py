"""Compute-bound sizes: tokens per second, and how far from what the tasks alone would take."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.comparison import Comparison, compare
from benchmarks.measure import Conditions, Result, Table, Target
from benchmarks.peers import PEERS, PIPELINED
from benchmarks.workload import Workload

CASES = ((2, 8), (4, 8))
QUICK = ((2, 8),)


def workload(groups: int, microbatches: int) -> Workload:
    return Workload(groups, microbatches, layers=8, d_model=256, heads=8, seq_len=64, batch=32)


def run(conditions: Conditions) -> Result:
    compared = [compare(workload(*case), conditions) for case in (QUICK if conditions.quick else CASES)]
    bounds = [bound(c, conditions.cores) for c in compared]
    targets = [t for c, limit in zip(compared, bounds, strict=True) for t in _targets(c, limit)]
    data = [c.data() | dataclasses.asdict(b) for c, b in zip(compared, bounds, strict=True)]
    return Result([_table(compared, bounds)], targets, data)


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of a step that no schedule of the measured tasks can beat here.

    Attributes:
      simulated: if every group had a core of its own, and messages took no time.
      work: all tasks, spread evenly over the cores.
    """

    simulated: float
    work: float

    @property
    def seconds(self) -> float:
        return max(self.simulated, self.work)


def bound(comparison: Comparison, cores: int) -> Bound:
    """The bound, for as many steps in a row as were timed on Ray."""
    from mpmd.simulate import Costs, simulate

    costs = Costs.measured(comparison.events)
    steps = comparison.steps.get("on_ray", 1)
    simulated = simulate(comparison.plan, costs, steps=steps)
    return Bound(simulated.makespan / steps, sum(simulated.busy) / steps / cores)


def _table(compared: Sequence[Comparison], bounds: Sequence[Bound]) -> Table:
    rows = [
        (peer.name, *(f"{c.workload.tokens / c.median(peer.key):,.0f}" for c in compared))
        for peer in PEERS
        if peer.key in compared[0].seconds
    ]
    rows.append(
        (
            "the bound",
            *(f"{c.workload.tokens / b.seconds:,.0f}" for c, b in zip(compared, bounds, strict=True)),
        )
    )
    return Table("Throughput", ("compute-bound: tokens/s", *(str(c.workload) for c in compared)), tuple(rows))


def _targets(c: Comparison, limit: Bound) -> list[Target]:
    if "on_ray" not in c.seconds:
        return []
    what = f"compute-bound, {c.workload}"
    share = statistics.median(limit.seconds / seconds for seconds in c.seconds["on_ray"])
    targets = [Target(f"{what}: of the bound on Ray", share, 0.9, at_least=True)]
    if others := [key for key in PIPELINED if key in c.seconds]:
        fastest = min(others, key=c.median)
        targets.append(
            Target(f"{what}: on_ray / {fastest}, the fastest peer", c.ratio("on_ray", fastest), 1.0)
        )
    return targets
