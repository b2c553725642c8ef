"""The faults of recorded times that were read from a file: times that do not belong to the plan."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.ir.plan import GroupProgram, Plan, Recv, Send
from mpmd.ir.process_times import ProcessTimes, RecordedStep, SendTime, TaskTime, WaitTime
from mpmd.ir.routes import Topology
from mpmd.util.tables import first_few

_LATEST = 2**62
"""The largest time, in nanoseconds, that a file may have."""


def fault_of(plan: Plan, topology: Topology, recorded: Sequence[RecordedStep]) -> str | None:
    """The first fault, as text; ``None`` without one. Groups without a part in the step have no times."""
    if len(topology.groups) != len(plan.programs):
        return "it has another number of groups than its plan"
    if not recorded:
        return "it has no step"
    names = {executable.name for executable in plan.executables}
    missing = {run.executable for program in plan.programs for run in program.runs} - names
    if missing:
        return f"its plan lacks {first_few(sorted(missing))}"
    return next((fault for step in recorded if (fault := _fault_of_step(plan, topology, step))), None)


def _fault_of_step(plan: Plan, topology: Topology, step: RecordedStep) -> str | None:
    if not -_LATEST < step.called < step.returned < _LATEST:
        return "a step ends before it was called"
    present = [(times.mpmd_idx, times.rank) for times in step.processes]
    if len(set(present)) < len(present):
        return "a step has the times of a process more than once"
    for program, group in zip(plan.programs, topology.groups, strict=True):
        ranks = sorted(rank for mpmd_idx, rank in present if mpmd_idx == program.mpmd_idx)
        expected = range(group.num_processes) if ranks or program.instructions else range(0)
        if len(ranks) != len(expected) or ranks != list(expected):
            count = f"{len(ranks)} of {len(expected)}"
            return f"a step has the times of {count} processes of group {program.mpmd_idx}"
    for times in step.processes:
        who = f"process {times.rank} of group {times.mpmd_idx}"
        if not 0 <= times.mpmd_idx < len(plan.programs):
            return f"a step has times of group {times.mpmd_idx}, which its plan lacks"
        if fault := _fault_of_times(plan.programs[times.mpmd_idx], times):
            return f"{who} {fault}"
    return None


def _fault_of_times(program: GroupProgram, times: ProcessTimes) -> str | None:
    moments = [times.received, times.ready, times.finished, times.replied]
    if moments != sorted(moments) or not -_LATEST < moments[0] <= moments[-1] < _LATEST:
        return "replied before it was asked"
    spans: list[TaskTime | WaitTime | SendTime] = [*times.tasks, *times.waits, *times.sends]
    if any(not times.received <= span.start <= span.end <= times.replied for span in spans):
        return "did something before it was asked, or after it had replied"
    if [task.task for task in times.tasks] != [run.task for run in program.runs]:
        return "ran other tasks than its program"
    sends = [(i.dst, i.tag) for i in program.instructions if isinstance(i, Send)]
    receives = {(i.src, i.tag) for i in program.instructions if isinstance(i, Recv)}
    is_sent = [(send.dst, send.tag) for send in times.sends] == sends
    if not is_sent or {(wait.src, wait.tag) for wait in times.waits} != receives:
        return "sent or received other messages than its program"
    return None
