"""Steps under ``jax.profiler``, whose traces of all processes come to the driver."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping

from mpmd.runtime.device_trace import TraceFiles, make_run_folder, write_traces
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.survey import start_traces, stop_traces
from mpmd.util.warn import warn_user


@contextlib.contextmanager
def traced(runtime: Runtime, trace_dir: str | os.PathLike | None) -> Iterator[Mapping[str, TraceFiles]]:
    """A context in which every process is traced; writes the traces at its end. Without a folder, none is.

    Yields: the files of each process by its name, which are there at the end, unless they are lost.
    Raises: as ``make_run_folder`` and ``start_traces``.
    """
    if trace_dir is None:
        yield {}
        return
    folder = make_run_folder(trace_dir)
    traces: dict[str, TraceFiles] = {}
    start_traces(runtime)
    try:
        yield traces
    except BaseException as error:
        if lost := _bring_traces(runtime, folder, traces):
            error.add_note(lost)
        raise
    if lost := _bring_traces(runtime, folder, traces):
        warn_user(lost, RuntimeWarning)


def _bring_traces(runtime: Runtime, folder: pathlib.Path, traces: dict[str, TraceFiles]) -> str | None:
    try:
        traces |= stop_traces(runtime)
        write_traces(folder, traces)
    except (RuntimeError, OSError) as error:
        return f"the traces of this step are lost: {error}"
    return None
