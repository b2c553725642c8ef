"""Steps under ``jax.profiler``, whose traces of all processes come to the driver."""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterator

from mpmd.runtime.device_trace import make_run_folder, write_traces
from mpmd.runtime.protocol import Runtime


@contextlib.contextmanager
def traced(runtime: Runtime, trace_dir: str | os.PathLike) -> Iterator[None]:
    """A context in which every process is traced; writes the traces at its end.

    Raises: as ``make_run_folder`` and ``Runtime.start_trace``.
    """
    folder = make_run_folder(trace_dir)
    runtime.start_trace()
    try:
        yield
    except BaseException as error:
        if lost := _bring_traces(runtime, folder):
            error.add_note(lost)
        raise
    if lost := _bring_traces(runtime, folder):
        warnings.warn(lost, RuntimeWarning, stacklevel=4)


def _bring_traces(runtime: Runtime, folder: pathlib.Path) -> str | None:
    """Ends and writes the traces. Returns the reason if they are lost."""
    try:
        write_traces(folder, runtime.stop_trace())
    except (RuntimeError, OSError) as error:
        return f"the traces of this step are lost: {error}"
    return None
