"""Times, changes and tasks as text for findings."""

from __future__ import annotations

import bisect

from mpmd.attribution.alternatives import Alternative
from mpmd.attribution.attribution import Attribution
from mpmd.attribution.gaps import Gap
from mpmd.attribution.measured import Measured
from mpmd.ir.plan import Cell, TaskType, with_slice
from mpmd.simulate import reasons
from mpmd.simulate.costs import types_of
from mpmd.util.tables import human_bytes

CONTENDED = 0.7
"""The part of a task's time up to which its processor time tells that it was kept from the processor."""


def time_text(nanoseconds: float) -> str:
    """A time with a unit that suits it, e.g. ``12.3 ms``."""
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(nanoseconds) >= scale:
            return f"{nanoseconds / scale:.3g} {unit}"
    return f"{nanoseconds:.0f} ns"


def less_text(share: float) -> str:
    """A share of a step that is saved, e.g. ``5.6% less``."""
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}"


def equal_stages_text(less: str) -> str:
    """The change of a step by equal stages, of which ``less`` is the size."""
    return f"with equal stages the step would take {less}"


def change_text(share: float, alternative: Alternative) -> str:
    """The time and the memory of an alternative, e.g. ``12.0% less, 1.1 GiB more``."""
    if alternative.extra_bytes is None:
        return less_text(share)
    if alternative.extra_bytes == 0:
        return f"{less_text(share)}, as much memory"
    more = "more" if alternative.extra_bytes > 0 else "less"
    return f"{less_text(share)}, {human_bytes(abs(alternative.extra_bytes))} {more}"


def task_text(attribution: Attribution, operation: int) -> str:
    """A task, e.g. ``fwd_2 on group 1 for microbatch 4``."""
    measured = attribution.measured
    task = measured.workload.tasks[operation]
    group = group_of(attribution, operation)
    if not isinstance(task, Cell):
        return f"{task} on group {group}"
    microbatches = sorted({member.microbatch for member in task.tasks})
    which = f"microbatch{'es' if len(microbatches) > 1 else ''} {', '.join(map(str, microbatches))}"
    types = with_slice(types_text(types_of(task)), task, measured.loops)
    return f"{types} on group {group} for {which}"


def gap_text(attribution: Attribution, gap: Gap) -> str:
    """The reason of a gap as ``Simulation.gaps`` words it, with its causes, the largest first.

    E.g. ``waits for bwd_1__0 of group 1: fill 2.1 ms, message 30 µs``.
    """
    named = sorted(zip(gap.causes._fields, gap.causes, strict=True), key=lambda item: -item[1])
    causes = ", ".join(f"{cause.replace('_', ' ')} {time_text(time)}" for cause, time in named if time)
    return f"{_waits_text(attribution, gap)}: {causes}"


def _waits_text(attribution: Attribution, gap: Gap) -> str:
    if gap.after < 0:
        return reasons.NOTHING_LEFT
    workload, is_first = attribution.measured.workload, gap.before < 0
    if gap.waited >= 0:
        return reasons.waits_for(workload.task_text(gap.waited), group_of(attribution, gap.waited), is_first)
    if gap.message >= 0:
        sender = workload.messages.senders[gap.message]
        return reasons.waits_for_transfer(workload.task_text(sender), group_of(attribution, sender), is_first)
    return "begins" if is_first else "goes on to its next task"


def group_of(attribution: Attribution, operation: int) -> int:
    """The group of an operation."""
    return bisect.bisect_right(attribution.measured.workload.bounds, operation) - 1


def types_text(types: tuple[TaskType, ...]) -> str:
    """The types of a cell, e.g. ``fwd_2`` or ``fwd_3 with bwd_3``."""
    return " with ".join(map(str, types))


def processor_text(measured: Measured, operation: int) -> str:
    """The use of the processor by a task; "" if it is not known."""
    duration = measured.duration(operation)
    used = measured.processor[operation]
    if used is None or not duration:
        return ""
    if used < CONTENDED * duration:
        share = f"its process computed for {used / duration:.0%} of that"
        return f"{share}: it slept, or waited for cores or for other processes of its group"
    return "its process computed throughout"
