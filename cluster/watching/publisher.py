"""Describes a mesh to viewers: a thread of the driver looks once a second whether one has asked."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence

import ray

from cluster.driver.ray_session import RaySession
from cluster.driver.status import ProcessStatus
from cluster.mesh import ClusterMesh
from cluster.protocol.process_info import ProcessInfo
from cluster.ray_compat import KeyValueStore
from cluster.watching.keys import POLL_SECONDS, RUN, VIEW
from mpmd.runtime.device_memory import MemoryUse
from mpmd.runtime.step_meter import StepCounts
from mpmd.watching.run_record import FunctionRecord, ProcessRecord, RunRecord

_CLOSE_SECONDS = 5.0
"""The seconds that ``close`` waits for a description that is under way."""

_MOST_CHARACTERS = 200
"""Of the state of a process."""


class Publisher:
    """Describes a mesh in Ray's store until ``close``, or until the mesh is dropped, which it does not keep.

    Nothing of it is in the way of steps. While nobody asks, it reads one small value a second from Ray.
    """

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex
        self._process = os.getpid()
        self._session = RaySession()
        self._store = KeyValueStore.of_driver()
        context = ray.get_runtime_context()
        self._job, self._node = context.get_job_id(), ray.util.get_node_ip_address()
        self._launched = time.time()
        self._published = 0
        self._asked: bytes | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, mesh: ClusterMesh) -> None:
        """Describes the mesh, and begins to answer viewers."""
        self._meters = mesh.runtime.meters
        self._publish(mesh, list(map(_unasked, mesh.processes)), ())
        self._thread = threading.Thread(
            target=self._serve, args=(weakref.ref(mesh),), name="mpmd top", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the thread, and takes the description back. May be called again. Does nothing in a fork."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _serve(self, mesh: weakref.ref[ClusterMesh]) -> None:
        """The thread."""
        try:
            while not self._ended.wait(POLL_SECONDS) and self._session.is_connected:
                if not self._answer(mesh()):
                    break
            if self._session.is_connected:
                self._store.delete(RUN + self.run)
                self._store.delete(VIEW + self.run)
        except Exception:
            # When Ray is shut down, any call of Ray may raise.
            if self._session.is_connected:
                raise

    def _answer(self, mesh: ClusterMesh | None) -> bool:
        """Describes the mesh if a viewer has asked since. Returns whether there is a mesh."""
        if mesh is None:
            return False
        asked = self._store.get(VIEW + self.run)
        if asked != self._asked:
            self._asked = asked
            meters = self._meters.all()
            for meter in meters:
                meter.watch()
            counts = [meter.counts() for meter in meters]
            memory = _latest_memory(counts)
            self._publish(mesh, [_asked(status, memory) for status in mesh.status().processes], counts)
        return True

    def _publish(
        self, mesh: ClusterMesh, processes: Sequence[ProcessRecord], counts: Sequence[StepCounts]
    ) -> None:
        self._published += 1
        recoveries = mesh.recoveries
        record = RunRecord(
            run=self.run,
            program=os.path.basename(sys.argv[0]),
            node=self._node,
            pid=self._process,
            job=self._job,
            platform=mesh.platform,
            launched=self._launched,
            published=self._published,
            recoveries=len(recoveries),
            recovery_seconds=sum(mesh.recovery_seconds),
            last_recovery=str(recoveries[-1]) if recoveries else None,
            processes=tuple(processes),
            functions=tuple(map(_function, counts)),
        )
        self._store.put(RUN + self.run, record.to_json().encode())


def _unasked(process: ProcessInfo) -> ProcessRecord:
    return ProcessRecord(process.mpmd_idx, process.rank, process.node, process.pid, process.shares_with)


def _asked(status: ProcessStatus, memory: Mapping[int, MemoryUse]) -> ProcessRecord:
    process = status.process
    used = memory.get(process.mpmd_idx) if process.rank == 0 else None
    return dataclasses.replace(
        _unasked(process),
        state=status.state.partition("\n")[0][:_MOST_CHARACTERS],
        pending=status.pending,
        host_bytes=used and used.host,
        device_bytes=used and used.device,
    )


def _function(counts: StepCounts) -> FunctionRecord:
    values = {field.name: getattr(counts, field.name) for field in dataclasses.fields(FunctionRecord)}
    return FunctionRecord(**values)


def _latest_memory(counts: Sequence[StepCounts]) -> dict[int, MemoryUse]:
    """The memory of each group, by the function whose step has ended last."""
    ended = [each for each in counts if each.seconds_since_end is not None]
    memory: dict[int, MemoryUse] = {}
    for each in sorted(ended, key=lambda each: -(each.seconds_since_end or 0.0)):
        memory |= each.memory
    return memory
