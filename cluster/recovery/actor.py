"""The actor of a process that may outlive processes of its mesh.

It copies its values, keeps copies for another process, and connects again after a recovery.
"""

from __future__ import annotations

import collections
import signal
import threading
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import ray

from cluster.process.actor import GroupActor
from cluster.protocol.endpoint import Endpoint
from cluster.recovery.store import Chunk, DamagedCopyError, Snapshot, SnapshotStore, restore
from mpmd.runtime.lost_values import LostValue
from mpmd.runtime.requests import Handle, Release, Request


class RecoverableActor(GroupActor):
    """A ``GroupActor`` that takes part in recovery. Its arguments are the same.

    Processes are named by their numbers, snapshots by theirs.
    """

    CONCURRENCY_GROUPS: ClassVar[Mapping[str, int]] = {
        **GroupActor.CONCURRENCY_GROUPS,
        "snapshots": 1,
        "notice": 1,
    }
    """Copies travel in a thread of their own, while steps run."""

    def __init__(self, endpoint: Endpoint, compilation_cache: str | None):
        super().__init__(endpoint, compilation_cache)
        self._serving = threading.Lock()
        # The process's own copies and those that it keeps for others, by process.
        self._stores: dict[int, SnapshotStore] = collections.defaultdict(SnapshotStore)
        self._told_to_end = threading.Event()
        # Ray's own handler, which ends the process, gets the second signal.
        self._handler_before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        """The node is to end soon. The driver has another process take this one's place, and ends it."""
        signal.signal(signal.SIGTERM, self._handler_before)
        self._told_to_end.set()

    @ray.method(concurrency_group="notice")
    def await_notice(self) -> None:
        self._told_to_end.wait()

    # A process that takes the place of another one.

    def warm_up(self) -> None:
        """Has a spare process take its devices, unless processes of its group have to meet first."""
        if self._endpoint.shape.num_processes == 1:
            jax.block_until_ready(jax.numpy.zeros(1) + 1)

    def adopt(self, endpoint: Endpoint) -> None:
        """Makes a spare process one of a group. Call ``open`` next."""
        self._endpoint = endpoint

    # A process that others leave.

    @ray.method(concurrency_group="control")
    def interrupt(self) -> None:
        self._router.interrupt()

    def reset(self, programs: Collection[int]) -> None:
        """Ends the connections with other groups and the driver, as soon as no step runs.

        Keeps values and ``programs``; drops programs that some processes have not loaded. Then ``listen`` and
        ``connect`` connect again.
        """
        self._forever.set()
        with self._serving:  # ``serve`` has ended
            self._forever = threading.Event()
            self._router.close()
        self._shipments.clear()
        self._worker.keep_only(programs)

    @ray.method(concurrency_group="watch")
    def serve(self) -> None:
        with self._serving:
            super().serve()  # type: ignore[operator]  # Ray declares it as a remote method

    # Snapshots.

    def answer(self, request: Request) -> Any:
        if not isinstance(request, Snapshot):
            return super().answer(request)
        super().answer(Release(request.released))
        store = self._stores[self._endpoint.number]
        store.keep_only(request.base)
        store.take(request.number, self._worker.values(), self._worker.submesh)
        return None

    @ray.method(concurrency_group="snapshots")
    def hand_over(self, process: int, number: int, base: int, index: int) -> Chunk:
        return self._stores[process].chunks(number, base)[index]

    @ray.method(concurrency_group="snapshots")
    def keep(self, process: int, number: int, base: int, index: int, chunk: Chunk) -> bool:
        """Takes in a chunk of a process's snapshot. With the first one, all but the base is dropped.

        Returns: whether this was the last chunk of the snapshot.
        Raises: ``DamagedCopyError`` when it is not as it was made.
        """
        store = self._stores[process]
        if index == 0:
            store.keep_only(base)
        try:
            store.add(number, chunk)
        except DamagedCopyError as error:
            me = self._endpoint
            raise DamagedCopyError(
                f"{me.name} cannot keep values of {me.name_of(process)}: {error}"
            ) from error
        return chunk.handles is not None

    @ray.method(concurrency_group="snapshots")
    def find_damaged(self, number: int, processes: Collection[int]) -> dict[int, list[Handle]]:
        damaged = {process: self._stores[process].damaged(number) for process in processes}
        return {process: handles for process, handles in damaged.items() if handles}

    def restore(self, number: int, kept: Collection[int]) -> None:
        """Replaces all values that live here by the values of the process's own snapshot.

        ``kept`` are the processes whose snapshots this one keeps from now on.
        """
        me = self._endpoint.number
        for process in self._stores.keys() - {me, *kept}:
            del self._stores[process]
        store = self._stores[me]
        store.keep_only(number)
        submesh = self._worker.submesh
        self._worker.replace_values({})  # so that devices never hold both
        self._worker.replace_values(
            {
                handle: saved if isinstance(saved, LostValue) else restore(saved, submesh)
                for handle, saved in store.values(number).items()
            }
        )
