"""The cost of noticing wrong bits: steps that are repeated now and then, and replicas that are compared.

With a snapshot every ten steps, in turns: without repetitions, and with one after each 10 and each 30 steps.
A repetition begins when all groups have answered, goes back to the last snapshot, and runs the steps since,
with digests of all that each task makes. Steps in between have digests of messages.
"""

from __future__ import annotations

import contextlib
import functools
import statistics

import cluster
from benchmarks.measure import Conditions, Result, Table, interleaved, ratio, seconds_of
from benchmarks.recovery import EVERY, GROUPS, QUICK, SIZES, Training, training

INTERVALS = {"without": None, "every 10": 10, "every 30": 30}
BLOCKS = 3
"""Blocks of ten steps that are measured together, so that each interval has as many repetitions."""


def run(conditions: Conditions) -> Result:
    rows, data = [], []
    for size in QUICK if conditions.quick else SIZES:
        with contextlib.ExitStack() as meshes:
            steps = {
                name: meshes.enter_context(
                    training(size, cluster.Recovery(every=EVERY, verify_every=interval))
                )
                for name, interval in INTERVALS.items()
            }
            times = interleaved(
                {name: functools.partial(_seconds, each) for name, each in steps.items()},
                max(5, conditions.effort.repetitions),
            )
            plain = steps["without"]
            replicas = statistics.median(seconds_of(plain.mesh.verify_replicas) for _ in range(5))
        rows.append(
            (
                f"{plain.nbytes / GROUPS / 1e6:.0f} MB",
                *(f"{statistics.median(each) / EVERY / BLOCKS * 1e3:.1f}" for each in times.values()),
                *(f"{ratio(times[name], times['without']):.2f}" for name in times if name != "without"),
                f"{replicas * 1e3:.1f}",
            )
        )
        data.append({"bytes": plain.nbytes, "seconds": times, "replicas": replicas})
    header = (
        "state of a group",
        "ms of a step, without",
        "every 10",
        "every 30",
        "every 10 / without",
        "every 30 / without",
        "ms to compare replicas",
    )
    return Result([Table("Noticing wrong bits", header, tuple(rows))], [], data)


def _seconds(each: Training) -> float:
    return seconds_of(lambda: [each.block() for _ in range(BLOCKS)])
