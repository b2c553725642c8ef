"""Tiny tasks: what a step and a task cost when there is next to nothing to compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.comparison import Comparison, compare
from benchmarks.measure import Conditions, Result, Table, Target
from benchmarks.peers import PEERS
from benchmarks.split import Split, split
from benchmarks.workload import Workload

CASES = ((2, 8), (2, 32), (4, 8), (4, 32))
QUICK = ((2, 8),)


def workload(groups: int, microbatches: int) -> Workload:
    """A layer for each group, a sequence for each microbatch."""
    return Workload(groups, microbatches, groups, d_model=32, heads=2, seq_len=16, batch=microbatches)


def run(conditions: Conditions) -> Result:
    cases = QUICK if conditions.quick else CASES
    compared = [compare(workload(*case), conditions, profile=True) for case in cases]
    splits = [split(c.profiled) if c.profiled else [] for c in compared]
    tables = [_table(compared), *([_split_table(compared, splits)] if any(splits) else [])]
    data = [
        c.data() | {"on_ray_split": [dataclasses.asdict(s) for s in of_groups]}
        for c, of_groups in zip(compared, splits, strict=True)
    ]
    return Result(tables, [target for c in compared for target in _targets(c)], data)


def _table(compared: Sequence[Comparison]) -> Table:
    header = ("tiny tasks: ms per step (us per task)", *(str(c.workload) for c in compared))
    rows = [
        (
            peer.name,
            *(f"{c.median(peer.key) * 1e3:.1f} ({c.median(peer.key) / c.tasks * 1e6:.0f})" for c in compared),
        )
        for peer in PEERS
        if peer.key in compared[0].seconds
    ]
    return Table("Overhead", header, tuple(rows))


def _split_table(compared: Sequence[Comparison], splits: Sequence[Sequence[Split]]) -> Table:
    header = ("us per task of the group", "tasks", "running", "waiting", "executor, sends", "between steps")
    rows = [
        (
            f"{c.workload}: group {s.mpmd_idx}",
            str(s.tasks),
            *(f"{part / s.tasks * 1e6:.0f}" for part in (s.running, s.waiting, s.handling, s.between)),
        )
        for c, of_groups in zip(compared, splits, strict=True)
        for s in of_groups
    ]
    return Table("What a step on Ray is made of, while it is profiled", header, tuple(rows))


def _targets(c: Comparison) -> list[Target]:
    limits = (
        ("on_ray", "seq", 1.0),
        ("on_ray", "torch", 0.5),
        ("on_ray", "ray_calls", 0.5),
        ("on_ray", "ray_graph", 0.5),
        ("in_process", "thr", 1.0),
    )
    return [
        Target(f"tiny tasks, {c.workload}: {ours} / {other}", c.ratio(ours, other), limit)
        for ours, other, limit in limits
        if {ours, other} <= set(c.seconds)
    ]
