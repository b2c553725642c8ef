"""Times, shares and tasks as text for findings."""

from __future__ import annotations

import bisect

from mpmd.attribution.measured import Measured
from mpmd.ir.plan import Cell, with_slice
from mpmd.simulate.costs import types_of

CONTENDED = 0.7
"""The part of a task's time up to which its processor time tells that it was kept from the processor."""


def time_text(nanoseconds: float) -> str:
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(nanoseconds) >= scale:
            return f"{nanoseconds / scale:.3g} {unit}"
    return f"{nanoseconds:.0f} ns"


def less_text(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}"


def task_text(measured: Measured, operation: int) -> str:
    """A task, e.g. ``fwd_2 on group 1 for microbatch 4``."""
    task = measured.workload.tasks[operation]
    group = bisect.bisect_right(measured.workload.bounds, operation) - 1
    if not isinstance(task, Cell):
        return f"{task} on group {group}"
    microbatches = sorted({member.microbatch for member in task.tasks})
    which = f"microbatch{'es' if len(microbatches) > 1 else ''} {', '.join(map(str, microbatches))}"
    return f"{types_text(measured, task)} on group {group} for {which}"


def types_text(measured: Measured, task: Cell) -> str:
    return with_slice(" with ".join(map(str, types_of(task))), task, measured.loops)


def processor_text(measured: Measured, operation: int) -> str:
    duration = measured.durations[operation]
    used = measured.processor[operation]
    if used is None or not duration:
        return ""
    if used < CONTENDED * duration:
        share = f"its process computed for {used / duration:.0%} of that"
        return f"{share}: it slept, or waited for cores or for other processes of its group"
    return "its process computed throughout"
