"""The runtime of a mesh that recovers: what steps, arrays and checkpoints ask of its groups.

It has groups asked by way of ``Requests``, which can ask again. So callers notice nothing of a death but that
a step takes longer.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
from ray.actor import ActorHandle

from cluster.driver.calls.joined import failed
from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.runtime import RayRuntime
from cluster.driver.status import Status, while_recovering
from cluster.recovery.actions import KeptHere
from cluster.recovery.events import Closed, StepAsked
from cluster.recovery.left_out import crossing_fault
from cluster.recovery.membership import Membership
from cluster.recovery.policy import Recovery
from cluster.recovery.process_pool import ProcessPool
from cluster.recovery.report import CorruptionReport, FoundValue, RecoveryReport
from cluster.recovery.requests import Requests
from cluster.recovery.saving import Saving
from cluster.recovery.shell import Shell
from cluster.recovery.states import State
from cluster.recovery.unlogged import UnloggedRequests
from cluster.tcp.connection import Connection
from mpmd.errors import MESH_CLOSED, GroupDiedError
from mpmd.program import Program
from mpmd.runtime.collectives import ExecutableAnalysis
from mpmd.runtime.device_trace import TraceFiles
from mpmd.runtime.digests import ProcessDigests
from mpmd.runtime.fetch_kept import drop_kept, fetch_kept
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.protocol import LoadedProgram, RuntimeBase
from mpmd.runtime.requests import Handle, StepReply, StepRequest
from mpmd.runtime.storage import JsonSpec, StoredArray
from mpmd.util.warn import warn_user


class RecoveringRuntime(RuntimeBase):
    """Implements ``mpmd.runtime.protocol.Runtime`` by another one, whose processes may be replaced.

    Nothing can be asked before ``attach``.

    Groups also go back when a step fails that has taken arguments over, which are there again then.

    Args:
      groups: the other runtime, which is not attached yet.
      pool: the running processes.
      policy: when to copy values, and when to give up.
      on_recovery: is called with a report of each recovery, and of each move of a group.
      on_corruption: is called with a report of wrong bits.
      max_in_flight: how many steps may be under way.
      left_out: the groups that are neither logged nor copied, and do not go back.
    """

    goes_back = True

    def __init__(
        self,
        groups: RayRuntime,
        pool: ProcessPool,
        policy: Recovery,
        on_recovery: Callable[[RecoveryReport], None],
        on_corruption: Callable[[CorruptionReport], None],
        max_in_flight: int = MAX_IN_FLIGHT,
        left_out: Collection[int] = (),
    ):
        super().__init__(len(groups.processes_per_group), max_in_flight)
        self.processes_per_group = groups.processes_per_group
        self._groups = groups
        self._pool = pool
        self._has_spares = policy.spares > 0
        self._digests = policy.verify_every is not None
        # None of them gets this object or a method of it: it ends when its last user drops it.
        self.left_out = frozenset(left_out)
        self._membership = Membership(policy, self.processes_per_group, left_out)
        self._requests = Requests(
            self._membership, groups, pool, self._released, self._handles.__next__, self.arguments
        )
        self._saving = Saving(self._requests)
        self._shell = Shell(self._requests, self._saving, on_recovery, on_corruption)
        self._unlogged = UnloggedRequests(self._requests, self._shell.wake)

    def attach(self, connections: Sequence[Connection]) -> None:
        """Begins to send requests to groups over the driver's connections, and to look after the groups."""
        self._shell.attach(connections)
        self._shell.start()

    @property
    def last_checkpoint(self) -> str | None:
        return self._membership.last_checkpoint

    @last_checkpoint.setter
    def last_checkpoint(self, path: str | None) -> None:
        self._membership.last_checkpoint = path

    @property
    def actors(self) -> tuple[ActorHandle, ...]:
        """The actors of all processes, group by group."""
        return tuple(self._pool.actors)

    @property
    def is_recovering(self) -> bool:
        """Whether groups are being replaced, or go back."""
        return self._membership.state is State.RECOVERING

    @property
    def attempt(self) -> int:
        return self._membership.times_back

    @property
    def logged_bytes(self) -> int:
        """The host arrays of the steps that would be run again."""
        return self._membership.journal.nbytes

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot is under way."""
        return self._membership.journal.snapshot is not None

    def load(self, program: Program) -> LoadedProgram:
        """As ``RayRuntime.load``. When a group dies meanwhile, loads again after the recovery.

        Raises also ``ValueError`` when groups could not run the program again.
        """
        self.check_process()
        if self.left_out and (fault := crossing_fault(program.plan, self.left_out)) is not None:
            raise fault
        requests, journal = self._requests, self._requests.journal
        while True:
            with requests.changed:
                requests.wait_until_running()
                if self._membership.error is not None:
                    raise copy_of(self._membership.error)
                attempt = journal.attempt
                requests.unload_unused()
            try:
                loaded, load_requests = self._groups.load_with_requests(program)
            except GroupDiedError as death:
                if death.mpmd_idx in self.left_out:
                    raise  # as long as the user does not have it replaced
                requests.wait_for_end_of(attempt)  # the recovery may be about to begin
                continue
            except RuntimeError:
                if attempt == journal.attempt:
                    raise
                continue
            with requests.changed:
                if attempt == journal.attempt:
                    requests.loads[loaded.number] = load_requests
                    return loaded
                self._groups.unload(loaded.number)  # new processes do not have it

    def unload(self, number: int) -> None:
        self._requests.unload(number)

    def wait_to_submit(self, mpmd_idxs: Collection[int]) -> None:
        """As in the protocol. Only steps that are logged wait for a snapshot that is late."""
        with self._requests.changed:
            if self._unlogged.concerns(mpmd_idxs):
                self._requests.wait_until_running()
            else:
                self._requests.wait_to_submit()

    def submit_step(self, requests: dict[int, StepRequest]) -> dict[int, Future[StepReply]]:
        """As in the protocol. Waits as ``wait_to_submit`` does."""
        asked, is_unlogged = self._requests, self._unlogged.concerns(requests)
        with asked.changed:
            self.wait_to_submit(requests)
            if (refusal := asked.refusal({i: each.handles for i, each in requests.items()})) is not None:
                return {i: failed(copy_of(refusal)) for i in requests}
            if is_unlogged:
                return self._unlogged.submit_step(requests)
            released = asked.take_released(requests)
            step = asked.journal.add_step(
                {
                    i: dataclasses.replace(request, released=released[i], digests=self._digests)
                    for i, request in requests.items()
                }
            )
            futures = asked.ask_first(step)
            is_due = self._membership.snapshot_is_due
            self._shell.tell(StepAsked())
            if is_due:
                self._unlogged.tell_released()
            return futures

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[jax.Array | np.ndarray]:
        self.check_process()
        with self._requests.changed:
            is_unlogged = self._unlogged.concerns([mpmd_idx])
            if is_unlogged:
                self._requests.wait_until_running()
            if (refusal := self._requests.refusal({mpmd_idx: [handle]})) is not None:
                return failed(refusal)
            if is_unlogged:
                return self._unlogged.fetch(mpmd_idx, handle)
            fetch = self._requests.journal.add_fetch(mpmd_idx, handle)
            return self._requests.ask_first(fetch)[mpmd_idx]

    def read(self, mpmd_idx: int, stored: Mapping[Handle, StoredArray]) -> Future[StepReply]:
        """As in the protocol. After a death it is repeated, unless a snapshot has the values."""
        self.check_process()
        with self._requests.changed:
            self._requests.wait_until_running()
            if (refusal := self._requests.refusal({mpmd_idx: stored})) is not None:
                return failed(refusal)
            if self._unlogged.concerns([mpmd_idx]):
                return self._unlogged.read(mpmd_idx, stored)
            read = self._requests.journal.add_read(mpmd_idx, stored)
            return self._requests.ask_first(read)[mpmd_idx]

    def copy_out(self, mpmd_idx: int, copy: Handle, handles: Sequence[Handle]) -> Future[None]:
        """As in the protocol. After a death the copy is made again, as long as the log goes back to it."""
        self.check_process()
        with self._requests.changed:
            self._requests.wait_until_running()
            if (refusal := self._requests.refusal({mpmd_idx: [copy, *handles]})) is not None:
                return failed(refusal)
            if self._unlogged.concerns([mpmd_idx]):
                return self._unlogged.copy_out(mpmd_idx, copy, handles)
            return self._saving.copy_out(mpmd_idx, copy, handles)

    def write(
        self, mpmd_idx: int, copy: Handle, specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]
    ) -> Future[list[int]]:
        """As in the protocol. A death of the group ends it only if the copy cannot be made again."""
        self.check_process()
        with self._requests.changed:
            is_unlogged = self._unlogged.concerns([mpmd_idx])
            if is_unlogged:
                self._requests.wait_until_running()
            if (refusal := self._requests.refusal({mpmd_idx: [copy]})) is not None:
                return failed(refusal)
            if is_unlogged:
                return self._unlogged.write(mpmd_idx, copy, specs)
            return self._saving.write(mpmd_idx, copy, specs)

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        self._saving.free(handle)
        self._unlogged.free(handle)
        super().free(mpmd_idxs, handle)

    def measured_peaks(self) -> tuple[int | None, ...]:
        """As in the protocol; while groups recover, nothing is known of any."""
        return self._groups.measured_peaks()

    def analyses(self, number: int) -> dict[str, ExecutableAnalysis]:
        """As in the protocol. Waits while groups recover."""
        with self._requests.changed:
            self._requests.wait_until_running()
        return self._groups.analyses(number)

    def start_trace(self) -> None:
        """As in the protocol. Not repeated for a process that replaces another."""
        with self._requests.changed:
            self._requests.wait_until_running()
        self._groups.start_trace()

    def stop_trace(self) -> dict[str, TraceFiles]:
        return self._groups.stop_trace()

    def find_nonfinite(self, refused: NonFinitePolicy, to: Path | None) -> FoundValue | None:
        """Finds the first value that ``refused`` refuses and a step has made since the last snapshot.

        All groups go back to the snapshot and repeat the steps, and have the same values again afterwards.
        Steps that are submitted meanwhile wait.

        Args:
          to: the directory for the task that has made the value; ``None`` not to write the task.
        """
        self.check_process()
        ending = self._requests.rewind(refused)
        found = ending.found
        for kept in ending.kept:
            at = (kept.step, kept.captured.mpmd_idx)
            if to is None or found is None or at != (found.step, found.mpmd_idx):
                drop_kept(self, kept.captured)
            elif self._write_kept(kept, to):
                found = found._replace(path=str(to))
        return found

    def _write_kept(self, kept: KeptHere, to: Path) -> bool:
        try:
            task = fetch_kept(self, kept.captured, kept.error)
            with jax.debug_nans(False), jax.debug_infs(False):
                self.captures.write(kept.program, task, to)
        except (OSError, RuntimeError) as fault:  # what was found is to be told in any case
            text = f"find_nan: {kept.captured.text} could not be written to {to}: {fault}"
            warn_user(text, RuntimeWarning)
            return False
        return True

    def digests(self) -> tuple[ProcessDigests, ...]:
        """As in the protocol. Waits while groups recover. Dead groups that are left out have no digests."""
        with self._requests.changed:
            self._requests.wait_until_running()
            groups = set(range(self._requests.num_groups)) - self._membership.left_out.dead.keys()
        while True:
            try:
                return self._groups.digests(groups)
            except GroupDiedError as death:
                if death.mpmd_idx not in self.left_out & groups:
                    raise
                groups.discard(death.mpmd_idx)

    def status(self) -> Status:
        """As ``RayRuntime.status``. While groups recover, says which are being replaced."""
        self.check_process()
        if self.is_recovering and not self._shell.has_ended:
            dead = dict(self._membership.dead)
            return while_recovering(self._pool.infos, dead, self._requests.count_waiting())
        status = self._groups.status()
        if not self._has_spares or self._shell.has_ended:
            return status
        return dataclasses.replace(status, ready_spares=self._pool.replacements.count_ready_spares())

    def resize(self, num_places: int, timeout: float) -> None:
        """As ``Shell.resize``."""
        self.check_process()
        self._shell.resize(num_places, timeout)

    def replace(self, mpmd_idxs: Collection[int], timeout: float) -> None:
        """As ``UnloggedRequests.replace``."""
        self.check_process()
        self._unlogged.replace(mpmd_idxs, timeout)

    def close(self) -> None:
        """Kills the actors; all calls that are under way fail. May be called again. Not in a fork."""
        if os.getpid() != self._process:
            return
        self.is_closed = True
        with self._requests.changed:
            self._shell.tell(Closed(RuntimeError(MESH_CLOSED)))
        self._groups.close()
        self._pool.release()
