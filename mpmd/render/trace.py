"""Writes steps as traces, which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpmd.ir.events import Event, checked_events
from mpmd.render.chart import tasks_of
from mpmd.simulate import Gap, Simulation
from mpmd.validation import path_fault, raise_faults

MICROSECONDS = 1e6


def chrome_trace(
    source: Simulation | Iterable[Event], path: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """A step in the Trace Event Format: one row per group, and times in microseconds from the first event.

    The trace of a simulation also has the reasons why groups are idle, and a counter of each group's memory;
    the simulation's unit of time counts as a second.

    Args:
      source: a simulation, or the measured events of one step.
      path: the file to write, which Perfetto and ``chrome://tracing`` open. ``None`` writes none.

    Returns: the trace, as ``json.dump`` writes it.
    Raises: ``TypeError`` for a path of another type, and ``OSError`` for a file that cannot be written.

    Source: Google, "Trace Event Format" (complete events, ``ph: X``, metadata events, ``ph: M``, and counter
    events, ``ph: C``).
    """
    raise_faults(path_fault("path", path, optional=True), title="chrome_trace: ")
    trace = _trace(source)
    if path is not None:
        Path(path).write_text(json.dumps(trace), encoding="utf-8")
    return trace


def _trace(source: Simulation | Iterable[Event]) -> dict[str, Any]:
    simulation = source if isinstance(source, Simulation) else None
    events = list(source.events) if isinstance(source, Simulation) else checked_events("source", source)
    spans: list[Event | Gap] = [*events, *(simulation.gaps if simulation else ())]
    spans.sort(key=lambda span: (span.mpmd_idx, span.start))
    origin = 0.0 if simulation else min((event.start for event in events), default=0.0)
    groups = sorted({span.mpmd_idx for span in spans})
    names = [_metadata("thread_name", mpmd_idx, {"name": f"group {mpmd_idx}"}) for mpmd_idx in groups]
    order = [_metadata("thread_sort_index", mpmd_idx, {"sort_index": mpmd_idx}) for mpmd_idx in groups]
    slices = [_slice(span, origin) for span in spans]
    counters = _counters(simulation) if simulation else []
    return {"traceEvents": [*names, *order, *slices, *counters], "displayTimeUnit": "ms"}


def _metadata(name: str, mpmd_idx: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": mpmd_idx, "args": args}


def _slice(span: Event | Gap, origin: float) -> dict[str, Any]:
    tasks = () if isinstance(span, Gap) else tasks_of(span)
    kind = "idle" if isinstance(span, Gap) else "other"
    return {
        "ph": "X",
        "name": span.reason if isinstance(span, Gap) else span.label,
        "cat": "+".join(task.kind for task in tasks) or kind,
        "pid": 0,
        "tid": span.mpmd_idx,
        "ts": (span.start - origin) * MICROSECONDS,
        "dur": (span.end - span.start) * MICROSECONDS,
        "args": {"stage": tasks[0].stage, "microbatch": tasks[0].microbatch} if tasks else {},
    }


def _counters(simulation: Simulation) -> list[dict[str, Any]]:
    return [
        {
            "ph": "C",
            "name": f"memory of group {mpmd_idx}",
            "pid": 0,
            "ts": time * MICROSECONDS,
            "args": {"held": amount},
        }
        for mpmd_idx, steps in enumerate(simulation.memory)
        for time, amount in steps
    ]
