"""Sends one request to all groups of a mesh, and collects the answers.

Reports, ``verify_replicas`` and profiles call these functions, which need ``Runtime.ask`` alone.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Mapping

from mpmd.errors import GroupDiedError
from mpmd.runtime.device_trace import TraceFiles
from mpmd.runtime.digests import ProcessDigests
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Digests, MeasuredPeak, Release, StartTrace, StopTrace


def measured_peaks(runtime: Runtime) -> tuple[int | None, ...]:
    """For each group, the most bytes that were ever allocated on one of its devices.

    ``None`` where the backend's allocator does not count them, where the group is gone, and after ``close``.
    Does not wait for steps under way.
    """
    return tuple(_measured_peak(runtime, group) for group in _all_groups(runtime))


def _measured_peak(runtime: Runtime, mpmd_idx: int) -> int | None:
    try:
        return runtime.ask({mpmd_idx: MeasuredPeak()})[mpmd_idx].result()
    except RuntimeError:  # the group has died, or the mesh was closed
        return None


def take_digests(runtime: Runtime, mpmd_idxs: Collection[int] | None = None) -> tuple[ProcessDigests, ...]:
    """Digests of all values of the groups, by default of all: of each process.

    Groups that have died, and that recovery leaves out, have none.

    Raises: ``GroupDiedError`` for the death of another group.
    """
    groups = _all_groups(runtime) if mpmd_idxs is None else sorted(mpmd_idxs)
    taken: list[ProcessDigests] = []
    for future in runtime.ask({group: Digests() for group in groups}).values():
        try:
            taken += future.result()
        except GroupDiedError as death:
            if death.mpmd_idx not in runtime.left_out:
                raise
    return tuple(taken)


def start_traces(runtime: Runtime) -> None:
    """Starts ``jax.profiler`` in every process, after the steps submitted before, and waits for that.

    Raises: ``RuntimeError`` when a process is traced already, ``GroupDiedError`` as a step's future.
    """
    for reached in runtime.ask({group: Release() for group in _all_groups(runtime)}).values():
        reached.result()
    started = runtime.ask({group: StartTrace() for group in runtime.traced_groups})
    if errors := [error for future in started.values() if (error := future.exception()) is not None]:
        # Of a group of several processes, some may have begun; a trace of somebody else goes on.
        begun = [
            group
            for group, future in started.items()
            if future.exception() is None or runtime.processes_per_group[group] > 1
        ]
        for group in begun:
            runtime.ask({group: StopTrace()})[group].exception()
        raise errors[0]


def stop_traces(runtime: Runtime) -> Mapping[str, TraceFiles]:
    """Ends the traces of ``start_traces``. Returns the files of each process, by its name.

    Raises: ``RuntimeError`` when a process was not traced, ``GroupDiedError`` as a step's future.
    """
    stopped = runtime.ask({group: StopTrace() for group in runtime.traced_groups})
    concurrent.futures.wait(stopped.values())  # also where one fails: no trace is to go on
    return StopTrace().join([future.result() for future in stopped.values()])


def _all_groups(runtime: Runtime) -> range:
    return range(len(runtime.processes_per_group))
