"""Traces of ``jax.profiler``: a process records one, and the driver keeps all in a folder and reads them."""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping

import jax

from mpmd.runtime.collectives import OPERATIONS
from mpmd.validation import path_fault, raise_faults

TraceFiles = Mapping[str, bytes]
"""The files that ``jax.profiler`` writes for a process: the content of each by the end of its name."""

_XPLANE = "xplane.pb"
_FILES = (_XPLANE, "trace.json.gz")

ALL_GROUPS = "all_groups"
"""The name in traces of a process that has all groups."""

_OPERATION = re.compile(rf"({'|'.join(OPERATIONS)})(-start|-done)?(\.\d+)?")


class DeviceTrace:
    """JAX records one trace of a process and its devices at a time."""

    def __init__(self) -> None:
        self._recording: tuple[contextlib.ExitStack, pathlib.Path] | None = None

    def start(self) -> None:
        """Raises ``RuntimeError`` when the process is traced already."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call; tasks have annotations
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            jax.profiler.start_trace(directory, profiler_options=options)
            self._recording = stack.pop_all(), pathlib.Path(directory)

    def stop(self) -> TraceFiles:
        if self._recording is None:
            raise RuntimeError("this process was not traced: it was replaced since the trace began")
        stack, directory = self._recording
        self._recording = None
        with stack:
            jax.profiler.stop_trace()
            written = list(directory.glob("plugins/profile/*/*"))
            return {end: path.read_bytes() for path in written for end in _FILES if path.name.endswith(end)}


def make_run_folder(trace_dir: str | os.PathLike) -> pathlib.Path:
    """A new folder for the files of one run, where XProf and TensorBoard look for it below ``trace_dir``.

    Raises: ``TypeError`` when ``trace_dir`` is no path, ``ValueError`` when the folder cannot be made.
    """
    raise_faults(path_fault("trace_dir", trace_dir))
    run = datetime.datetime.now().strftime("%Y_%m_%d_%H_%M_%S_%f")
    folder = pathlib.Path(trace_dir) / "plugins" / "profile" / run
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"trace_dir {os.fspath(trace_dir)!r} cannot be written: {error}") from error
    return folder


def write_traces(folder: pathlib.Path, traces: Mapping[str, TraceFiles]) -> None:
    for process, files in traces.items():
        for end, content in files.items():
            (folder / f"{process}.{end}").write_bytes(content)


def process_name(mpmd_idx: int, rank: int) -> str:
    return f"group_{mpmd_idx}_process_{rank}"


def trace_of(
    traces: Mapping[str, TraceFiles], mpmd_idx: int, rank: int, num_groups: int
) -> jax.profiler.ProfileData | None:
    """The trace of a process that has one group alone; ``None`` without one.

    Args:
      traces: by the names of processes.
    """
    name = ALL_GROUPS if num_groups == 1 and ALL_GROUPS in traces else process_name(mpmd_idx, rank)
    content = traces.get(name, {}).get(_XPLANE)
    return None if content is None else jax.profiler.ProfileData.from_serialized_xspace(content)


def collective_seconds(trace_dir: str | os.PathLike) -> dict[str, float] | None:
    """The seconds that a device spends in each kind of collective: the mean over the devices of the last run.

    They include waiting for other devices. Messages between groups are no operations of XLA's; the events of
    ``step.profile`` have the waits for them.

    Args:
      trace_dir: as of ``step.profile``.

    Returns: seconds by the name of the operation, such as ``"all-reduce"`` or ``"all-gather"``; empty when
      there were none. ``None`` where the platform does not record the operations of devices.
    Raises: ``FileNotFoundError`` when there is no trace.
    """
    devices = set()
    seconds: dict[str, float] = collections.defaultdict(float)
    for file in _files_of_last_run(trace_dir):
        trace = jax.profiler.ProfileData.from_file(str(file))
        # Of accelerators if they recorded any operations; else of the CPU's devices.
        accelerators = [plane for plane in trace.planes if plane.name.startswith("/device:")]
        for plane in accelerators or trace.planes:
            for event in (event for line in plane.lines for event in line.events):
                known = dict(event.stats)
                if "hlo_op" in known:
                    devices.add((file, plane.name if accelerators else known.get("device_ordinal")))
                    if match := _OPERATION.fullmatch(str(known["hlo_op"])):
                        seconds[match[1]] += event.duration_ns / 1e9
    return {name: total / len(devices) for name, total in seconds.items()} if devices else None


def _files_of_last_run(trace_dir: str | os.PathLike) -> list[pathlib.Path]:
    raise_faults(path_fault("trace_dir", trace_dir))
    runs = sorted(pathlib.Path(trace_dir).glob("plugins/profile/*/"))
    files = sorted(runs[-1].glob("*.xplane.pb")) if runs else []
    if not files:
        raise FileNotFoundError(f"there is no trace in {os.fspath(trace_dir)!r}")
    return files
