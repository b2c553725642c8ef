"""The runtime of a mesh that recovers: what steps, arrays and checkpoints ask of its groups.

It has groups asked by way of ``Ledger``, which can ask again. So callers notice nothing of a death but that
a step takes longer.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
from ray.actor import ActorHandle

from cluster.driver.calls.joined import failed
from cluster.driver.calls.pending_calls import copy_of
from cluster.driver.runtime import RayRuntime
from cluster.driver.status import ProcessesStatus, while_recovering
from cluster.recovery.copies import Copies
from cluster.recovery.ledger import Ledger, State
from cluster.recovery.left_out import crossing_fault, host_arrays_fault
from cluster.recovery.policy import Recovery
from cluster.recovery.processes import Processes
from cluster.recovery.report import CorruptionReport, FoundValue, RecoveryReport
from cluster.recovery.rewinds import KeptHere
from cluster.recovery.supervisor import Supervisor
from cluster.tcp.connection import Connection
from mpmd.errors import MESH_CLOSED, GroupDiedError
from mpmd.program import Program
from mpmd.runtime.in_flight import MAX_IN_FLIGHT
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.protocol import LoadedProgram, Runtime
from mpmd.runtime.requests import (
    CopyOut,
    Fetch,
    Handle,
    Request,
    StepRequest,
    Write,
)
from mpmd.util.warn import warn_user


class RecoveringRuntime(Runtime):
    """Implements ``Runtime`` by another one, whose processes may be replaced.

    Nothing can be asked before ``attach``.

    Groups also go back when a step fails that has taken arguments over, which are there again then.

    Args:
      groups: the other runtime, which is not attached yet.
      processes: the running processes.
      copies: of their values.
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
        processes: Processes,
        copies: Copies,
        policy: Recovery,
        on_recovery: Callable[[RecoveryReport], None],
        on_corruption: Callable[[CorruptionReport], None],
        max_in_flight: int = MAX_IN_FLIGHT,
        left_out: Collection[int] = (),
    ):
        super().__init__(groups.processes_per_group, max_in_flight)
        self._groups = groups
        self._processes = processes
        self._has_spares = policy.spares > 0
        self.left_out = frozenset(left_out)
        # None of them gets this object or a method of it: it ends when its last user drops it.
        self._ledger = Ledger(groups, policy, self.left_out, self._released, self.next_handle, self.arguments)
        self._supervisor = Supervisor(self._ledger, processes, copies, policy, on_recovery, on_corruption)

    def attach(self, connections: Sequence[Connection]) -> None:
        self._supervisor.attach(connections)
        self._supervisor.moves.start()

    @property
    def last_checkpoint(self) -> str | None:
        return self._supervisor.last_checkpoint

    @last_checkpoint.setter
    def last_checkpoint(self, path: str | None) -> None:
        self._supervisor.last_checkpoint = path

    @property
    def actors(self) -> tuple[ActorHandle, ...]:
        return tuple(self._processes.actors)

    @property
    def is_recovering(self) -> bool:
        return self._ledger.state is State.RECOVERING

    @property
    def attempt(self) -> int:
        return self._ledger.journal.attempt + self._supervisor.rewinds.count

    @property
    def is_copying(self) -> bool:
        return self._ledger.journal.snapshot is not None

    def load(self, program: Program) -> LoadedProgram:
        """As ``RayRuntime.load``. When a group dies meanwhile, loads again after the recovery.

        Raises also ``ValueError`` when groups could not run the program again.
        """
        self.check_process()
        if self.left_out and (fault := crossing_fault(program.plan, self.left_out)) is not None:
            raise fault
        ledger, journal = self._ledger, self._ledger.journal
        while True:
            with ledger.changed:
                ledger.wait_for(lambda: ledger.is_running)
                attempt = journal.attempt
                ledger.releases.unload_unused()
            try:
                loaded, load_requests = self._groups.load_with_requests(program)
            except GroupDiedError as death:
                if death.mpmd_idx in self.left_out and attempt == journal.attempt:
                    raise  # it is not being replaced, and stays dead until the user has it replaced
                ledger.wait_for_end_of(attempt)  # the recovery may be about to begin
                continue
            except RuntimeError:
                if attempt == journal.attempt:
                    raise
                continue
            with ledger.changed:
                if attempt == journal.attempt:
                    ledger.releases.loads[loaded.number] = load_requests
                    return loaded
                self._groups.unload(loaded.number)  # new processes do not have it

    def unload(self, number: int) -> None:
        self._ledger.releases.unload(number)

    def wait_to_submit(self, mpmd_idxs: Collection[int]) -> None:
        """As in the protocol. Only steps that are logged wait for a snapshot that is late."""
        with self._ledger.changed:
            if self.left_out.isdisjoint(mpmd_idxs):
                self._ledger.wait_to_submit()
            else:
                self._ledger.wait_until_running()

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Future]:
        """As ``Runtime.ask``. Requests that are logged are answered also if a group dies meanwhile.

        Steps wait as ``wait_to_submit`` does. While groups are replaced, fetches are logged, writes are kept
        until their copy is made again, and other requests wait.
        """
        self.check_process()
        if not requests:
            return {}
        (kind,) = {type(request) for request in requests.values()}
        if kind.beside_steps == "control":  # which says what the processes do now
            return self._groups.ask(requests)
        ledger, is_left_out = self._ledger, not self.left_out.isdisjoint(requests)
        with ledger.changed:
            if kind is StepRequest:
                self.wait_to_submit(requests)
            elif is_left_out or kind not in (Fetch, Write):
                ledger.wait_until_running()
            refusal = ledger.refusal(requests)
            if refusal is None and is_left_out:
                refusal = host_arrays_fault(requests, self.left_out)
            if refusal is not None:
                return {mpmd_idx: failed(copy_of(refusal)) for mpmd_idx in requests}
            if is_left_out or not (kind.is_repeatable or kind is Write):
                ledger.releases.unload_unused()
                return ledger.ask_once(requests, ledger.releases.take(self.left_out & requests.keys()))
            if kind is StepRequest:
                return self._submit_step(requests)
            return {mpmd_idx: self._ask_group(mpmd_idx, request) for mpmd_idx, request in requests.items()}

    def _submit_step(self, requests: Mapping[int, Request]) -> dict[int, Future]:
        ledger = self._ledger
        futures = ledger.ask_first(ledger.journal.add(requests, ledger.releases.take(requests)))
        self._supervisor.note_step()
        return futures

    def _ask_group(self, mpmd_idx: int, request: Request) -> Future:
        """Asks a group for something that is not a step, and that is asked again after a death."""
        match request:
            case CopyOut(copy):
                self._ledger.unwritten.add(copy)
            case Write():
                return self._ledger.write(mpmd_idx, request)
        return self._ledger.ask_first(self._ledger.journal.add({mpmd_idx: request}))[mpmd_idx]

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        ledger = self._ledger
        ledger.left_out.lost.pop(handle, None)
        if handle in ledger.unwritten:  # the caller may hold any lock, so another thread notifies
            ledger.unwritten.discard(handle)
            self._supervisor.moves.looks.put(None)
        super().free(mpmd_idxs, handle)

    def find_nonfinite(self, refused: NonFinitePolicy, to: Path | None) -> FoundValue | None:
        self.check_process()
        rewound = self._supervisor.rewinds.find(refused)
        found = rewound.found
        for kept in rewound.kept:
            at = (kept.step, kept.captured.mpmd_idx)
            if to is None or found is None or at != (found.step, found.mpmd_idx):
                self.drop_kept(kept.captured)
            elif self._write_kept(kept, to):
                found = found._replace(path=str(to))
        return found

    def _write_kept(self, kept: KeptHere, to: Path) -> bool:
        try:
            task = self.fetch_kept(kept.captured, kept.error)
            with jax.debug_nans(False), jax.debug_infs(False):
                self.captures.write(kept.program, task, to)
        except (OSError, RuntimeError) as fault:  # what was found is to be told in any case
            text = f"find_nan: {kept.captured.text} could not be written to {to}: {fault}"
            warn_user(text, RuntimeWarning)
            return False
        return True

    def status(self) -> ProcessesStatus:
        self.check_process()
        if self.is_recovering and not self._supervisor.background.has_ended:
            dead = dict(self._ledger.dead)
            return while_recovering(self._processes.infos, dead, self._ledger.count_waiting())
        status = self._groups.status()
        if not self._has_spares or self._supervisor.background.has_ended:
            return status
        return dataclasses.replace(status, ready_spares=self._processes.spares.count_ready())

    def resize(self, num_places: int, timeout: float) -> None:
        self.check_process()
        ledger, moves, allocations = self._ledger, self._supervisor.moves, self._processes.allocations
        if num_places < len(self.processes_per_group) and not allocations.can_share:
            raise RuntimeError(
                "resize: groups may not share devices here: the mesh was launched with "
                "Recovery(share_after=None), or on a platform whose devices belong to one process"
            )
        with ledger.changed:
            allocations.num_own = num_places
            moves.looks.put(None)
            ledger.wait_for(lambda: self._is_settled or ledger.left_out.fault_of(self._late), timeout)
            if fault := ledger.left_out.fault_of(self._late):
                raise RuntimeError(f"resize({num_places}): {fault}")
            if late := self._late:
                names, why = moves.explain(late)
                raise RuntimeError(
                    f"resize({num_places}): {names} did not move within {timeout:g} s{why}. "
                    "A group moves by itself as soon as there is a place for it"
                )

    @property
    def _is_settled(self) -> bool:
        """Whether each group is where it is to be, and no move is under way: its end gives resources back."""
        return not self._late and self._supervisor.moves.under_way is None

    @property
    def _late(self) -> list[int]:
        """The groups that share devices but should not, or should but do not; else, the groups that move."""
        allocations = self._processes.allocations
        sharing = {p.mpmd_idx for p in self._processes.infos if p.shares_with is not None}
        late = [
            i for i in range(len(self.processes_per_group)) if (i in sharing) == (i < allocations.num_own)
        ]
        return late or sorted(self._ledger.dead)

    def replace(self, mpmd_idxs: Collection[int], timeout: float) -> None:
        self.check_process()
        ledger, moves, wanted = self._ledger, self._supervisor.moves, self._ledger.left_out.wanted
        deadline = time.monotonic() + timeout
        with ledger.changed:
            may_begin = ledger.wait_for(lambda: ledger.is_running, timeout)
            for mpmd_idx in range(len(self.processes_per_group)):
                # Who was told by a step may be earlier than the ledger, also of a group of another part.
                if ledger.is_running and (death := self._groups.death_of(mpmd_idx)) is not None:
                    self._supervisor.note_death(death)
            dead = ledger.left_out.dead
            wanted.update(dead.keys() & set(mpmd_idxs))
            moves.looks.put(None)
            has_ended = ledger.wait_for(
                lambda: not (ledger.dead or dead.keys() & set(mpmd_idxs)),
                max(0.0, deadline - time.monotonic()),
            )
            if late := sorted(dead.keys() & set(mpmd_idxs)):
                wanted.difference_update(late)
                names, why = moves.explain(late)
                raise RuntimeError(f"replace: {names} did not begin anew within {timeout:g} s{why}")
            if not may_begin or not has_ended:
                raise RuntimeError(f"replace: other groups have recovered or moved for {timeout:g} s")

    def close(self) -> None:
        if os.getpid() != self._process:
            return
        self.is_closed = True
        self._supervisor.close(RuntimeError(MESH_CLOSED))
        self._groups.close()
        self._processes.release()
