"""Times of tasks from the trace of an accelerator, in place of times of the process that waits for it.

The process waits for a recorded task within an annotation of the task's name, so that the device's work for
the task lies within the annotation, on the clock of the trace. The task lasts from the begin of the first
event to the end of the last event of the process's devices within the annotation. The rest of the
annotation, before the first kernel and after the last, is the group's handling. The names of programs are
ignored, since kernels that XLA runs as one graph lack them.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from mpmd.ir.process_times import ProcessTimes, RecordedStep, TaskTime
from mpmd.runtime.device_trace import TraceFiles, trace_of
from mpmd.util.grouping import grouped
from mpmd.util.warn import warn_user

_RUNS = "XLA Modules"
"""The line of a TPU's plane that has the runs of programs."""

_STREAM = "Stream"
"""Prefix of the names of the lines of a GPU's plane that list the work of its streams."""


class TaskSpan(NamedTuple):
    """A task in a trace, in nanoseconds of the trace's clock.

    Attributes:
      called: the begin of the annotation.
      start, end: begin and end of the devices' work; ``None`` where the devices recorded no work.
    """

    name: str
    called: int
    start: int | None
    end: int | None


def task_spans(trace: jax.profiler.ProfileData, mpmd_idx: int) -> list[TaskSpan]:
    """The tasks of a group, the only one of its process, in the order of time."""
    annotations, events = list[tuple[int, int, str]](), list[tuple[int, int]]()
    for plane in trace.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:"):
                if line.name == _RUNS or line.name.startswith(_STREAM):
                    events += (_span(event) for event in line.events)
            else:
                annotations += (
                    (*_span(event), event.name)
                    for event in line.events
                    if dict(event.stats).get("group") == mpmd_idx
                )
    events.sort()
    begins = [begin for begin, _ in events]
    spans = []
    for begin, end, name in sorted(annotations):
        within = events[bisect.bisect_left(begins, begin) : bisect.bisect_right(begins, end)]
        first = min((start for start, _ in within), default=None)
        spans.append(TaskSpan(name, begin, first, max((last for _, last in within), default=None)))
    return spans


def _span(event: jax.profiler.ProfileEvent) -> tuple[int, int]:
    return round(event.start_ns), round(event.start_ns + event.duration_ns)


def with_device_times(
    steps: Sequence[RecordedStep], traces: Mapping[str, TraceFiles]
) -> tuple[RecordedStep, ...]:
    """Replaces the times of tasks in steps by the devices' times, where the traces have these.

    Processes of CPUs keep their times, since tasks run on the cores themselves. Processes also keep their
    times if their trace is missing or lists other tasks than were recorded, or if several groups share the
    process.

    Args:
      traces: the traces of the processes in which the steps ran, by the names of ``Runtime.stop_trace``.

    Warns: ``RuntimeWarning`` for a trace that cannot be read.
    """
    of_process = grouped(((times.mpmd_idx, times.rank), times) for step in steps for times in step.processes)
    num_groups = len({mpmd_idx for mpmd_idx, _ in of_process})
    replaced: dict[int, ProcessTimes] = {}
    for (mpmd_idx, rank), recorded in of_process.items():
        if any(times.on_cores for times in recorded):
            continue
        try:
            trace = trace_of(traces, mpmd_idx, rank, num_groups)
            spans = [] if trace is None else task_spans(trace, mpmd_idx)
        except (
            RuntimeError
        ) as error:  # the steps have run, and their result may be the only copy of the state
            text = f"the trace of process {rank} of group {mpmd_idx} cannot be read: {error}"
            warn_user(text, RuntimeWarning)
            continue
        replaced |= zip(map(id, recorded), device_times(recorded, spans), strict=True)
    return tuple(
        dataclasses.replace(step, processes=tuple(replaced.get(id(p), p) for p in step.processes))
        for step in steps
    )


def device_times(recorded: Sequence[ProcessTimes], spans: Sequence[TaskSpan]) -> list[ProcessTimes]:
    """Replaces the times of tasks in several steps of a process by the devices' times.

    Args:
      spans: the tasks of the trace. If they differ from the tasks of the steps, all times stay.
    """
    tasks = [task for times in recorded for task in times.tasks]
    names = [str(task.task) for task in tasks]
    different = frozenset(names)
    of_tasks = [span for span in spans if span.name in different]
    if not tasks or [span.name for span in of_tasks] != names:
        return list(recorded)
    # A task is called right after its start was noted: the least difference is that of the clocks.
    ahead = min(span.called - task.start for span, task in zip(of_tasks, tasks, strict=True))
    changed = iter([_on_device(task, span, ahead) for task, span in zip(tasks, of_tasks, strict=True)])
    return [
        dataclasses.replace(times, tasks=tuple(next(changed) for _ in times.tasks), has_device_times=True)
        for times in recorded
    ]


def _on_device(task: TaskTime, span: TaskSpan, ahead: int) -> TaskTime:
    if span.start is None or span.end is None:
        return task
    start = min(max(span.start - ahead, task.start), task.end)
    return task._replace(start=start, end=min(max(span.end - ahead, start), task.end))
