"""The allocations of the processes of a mesh that recovers: their own reservations, or shared devices.

A group's reservations are a placement group of their own, so that the group can give them back when it moves,
and request new ones when its node is gone or is to end. While a request waits for room, the group shares the
devices of processes that have a reservation.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from cluster.driver.ray_session import RaySession
from cluster.protocol.process_info import ProcessInfo
from cluster.ray_compat import draining_nodes
from cluster.recovery.report import DRAINED, GROWN, SHRUNK
from cluster.start.resources import (
    Allocation,
    Bundle,
    Reservation,
    SharedDevices,
    describe_shortage,
    live_nodes,
    request,
)

_POLL_SECONDS = 0.1

PROMPT_SECONDS = 2.0
"""The seconds that Ray may take to reserve resources where there is room."""


class NoAllocationError(RuntimeError):
    """There is neither room for a process, nor another one that it can share devices with."""


class _PendingReservations(NamedTuple):
    """Reservations that a group's processes wait for, on nodes other than ``avoided``."""

    numbers: tuple[int, ...]
    placement_group: PlacementGroup
    avoided: frozenset[str]


class Allocations:
    """The allocation of each process. Processes are named by their numbers. Thread-safe.

    Args:
      reservations: the reservation of each process, at the start.
      bundles: the resources of each process.
      mpmd_idxs: the group of each process.
      share_after: the seconds to wait for room before a process shares; ``None`` not to share.
      timeout: the seconds to wait for room when it does not.

    Attributes:
      can_share: whether processes may share devices.
      num_own: groups from this one on are to share devices.
      avoided: nodes that are to end, in addition to nodes that Ray knows to be drained.
    """

    def __init__(
        self,
        reservations: Sequence[Reservation],
        bundles: Sequence[Bundle],
        mpmd_idxs: Sequence[int],
        share_after: float | None,
        timeout: float,
    ):
        self._allocations: list[Allocation] = list(reservations)
        self._bundles = tuple(bundles)
        self._mpmd_idxs = tuple(mpmd_idxs)
        self._share_after = share_after
        self.can_share = share_after is not None
        self._timeout = timeout
        self._session = RaySession()
        self._lock = threading.Lock()
        self._requests: dict[int, _PendingReservations] = {}
        self._nodes: dict[Reservation, str] = {}
        self.placement_groups: set[PlacementGroup] = {
            reservation.placement_group for reservation in reservations
        }
        self.num_own = 1 + max(mpmd_idxs)
        self.avoided: frozenset[str] = frozenset()

    def of(self, number: int) -> Allocation:
        return self._allocations[number]

    def assign(self, number: int, allocation: Allocation) -> None:
        self._allocations[number] = allocation

    def numbers_of(self, mpmd_idx: int) -> list[int]:
        return [number for number, group in enumerate(self._mpmd_idxs) if group == mpmd_idx]

    @property
    def shares_with(self) -> dict[int, int]:
        return {
            n: allocation.host
            for n, allocation in enumerate(self._allocations)
            if isinstance(allocation, SharedDevices)
        }

    # Nodes.

    def good_nodes(self) -> frozenset[str]:
        return self._living_nodes() - draining_nodes() - self.avoided

    def _living_nodes(self) -> frozenset[str]:
        living = frozenset(node["NodeID"] for node in live_nodes())
        for allocation in [
            allocation for allocation, node in list(self._nodes.items()) if node not in living
        ]:
            self._nodes.pop(allocation, None)  # Ray moves a bundle of a node that is gone, if it can
        return living

    def node_of(self, allocation: Allocation) -> str:
        """Ray's identifier of an allocation's node; empty while Ray has none for it."""
        if isinstance(allocation, SharedDevices):
            return allocation.node_id
        if allocation not in self._nodes:
            table = placement_group_table(allocation.placement_group)
            node = table["bundles_to_node_id"].get(allocation.bundle_index, "")
            if not node:
                return node
            self._nodes[allocation] = node
        return self._nodes[allocation]

    def without_node(self) -> set[int]:
        """The processes whose nodes are gone, so that it is no use to wait for them."""
        living = self._living_nodes()
        return {n for n, each in enumerate(self._allocations) if self.node_of(each) not in living}

    # Which groups are to move.

    def groups_to_move(self) -> dict[int, str]:
        """The groups that are to move, and why: ``drained``, ``shrunk`` or ``grown``."""
        with self._lock:
            good, living, kinds = self.good_nodes(), self._living_nodes(), {}
            for mpmd_idx in sorted(set(self._mpmd_idxs)):
                self._renew_request(mpmd_idx, good)
                if kind := self._kind_of_move(mpmd_idx, good, living):
                    kinds[mpmd_idx] = kind
            return kinds

    def _kind_of_move(self, mpmd_idx: int, good: Collection[str], living: Collection[str]) -> str | None:
        allocations = [self._allocations[number] for number in self.numbers_of(mpmd_idx)]
        nodes = {self.node_of(allocation) for allocation in allocations}
        if not nodes <= set(living):
            return None  # it has died
        if not nodes <= set(good):
            return DRAINED
        if all(isinstance(allocation, Reservation) for allocation in allocations):
            return None if mpmd_idx < self.num_own else SHRUNK
        if self._state_of_request(mpmd_idx, good) == "CREATED":
            return GROWN
        for allocation in allocations:
            if isinstance(allocation, SharedDevices):
                host = self._allocations[allocation.host]
                if not isinstance(host, Reservation) or self.node_of(host) != allocation.node_id:
                    return SHRUNK
        return None

    def _state_of_request(self, mpmd_idx: int, good: Collection[str]) -> str | None:
        """Ray's state of the reservations that a group waits for; ``None`` if some are on no good node."""
        if (waiting := self._requests.get(mpmd_idx)) is None:
            return None
        table = placement_group_table(waiting.placement_group)
        nodes = set(table["bundles_to_node_id"].values()) - {""}
        return table["state"] if nodes <= set(good) else None

    # New allocations.

    def find(
        self,
        mpmd_idx: int,
        infos: Sequence[ProcessInfo],
        gone: Collection[int] = (),
        seconds: float | None = None,
        check: Callable[[], None] = lambda: None,
        waited: float = 0.0,
    ) -> dict[int, Allocation]:
        """Finds an allocation for each process of a group: as now, a new reservation, or shared devices.

        Args:
          infos: where the processes are.
          gone: processes that are dead; processes of the group itself need not be named.
          seconds: to wait for room before processes share; by default as the user wants it.
          check: is called while it waits, and raises to wait no longer.
          waited: seconds since this group's allocation is gone, in which other groups have waited for room.

        Raises: ``NoAllocationError``.
        """
        with self._lock:
            good, numbers = self.good_nodes(), self.numbers_of(mpmd_idx)
            may_reserve = mpmd_idx < self.num_own
            allocations = {n: self._allocations[n] for n in numbers}
            kept: dict[int, Allocation] = {
                n: allocation
                for n, allocation in allocations.items()
                if isinstance(allocation, Reservation) and may_reserve and self.node_of(allocation) in good
            }
            unallocated = [n for n in numbers if n not in kept]
            if not unallocated:
                return kept
            if seconds is None:
                seconds = self._share_after if self._share_after is not None else self._timeout
                if self.can_share and all(isinstance(allocations[n], SharedDevices) for n in unallocated):
                    seconds = 0.0  # they have waited before
                seconds = max(seconds - waited, min(seconds, PROMPT_SECONDS))
            if not good:
                seconds = 0.0  # Ray may have another node later, but none now
            if may_reserve:
                reserved = self._await_own(mpmd_idx, unallocated, seconds, check)
                if reserved is not None:
                    return kept | reserved
            living = self._living_nodes()
            try:
                if not self.can_share:
                    raise LookupError("it may not share the devices of others")
                return kept | self._share(unallocated, infos, gone, good)
            except LookupError as reason:
                if all(self.node_of(allocation) in living for allocation in allocations.values()):
                    return allocations  # on a node that is to end, but there is no other
                raise NoAllocationError(self._shortage(mpmd_idx, unallocated, seconds, str(reason))) from None

    def _shortage(self, mpmd_idx: int, numbers: Sequence[int], seconds: float, reason: str) -> str:
        bundles = [self._bundles[number] for number in numbers]
        shortage = describe_shortage(bundles, ray.available_resources(), live_nodes())
        return f"no room for group {mpmd_idx} within {seconds:g} s, and {reason}. {shortage}"

    def _share(
        self,
        numbers: Sequence[int],
        infos: Sequence[ProcessInfo],
        gone: Collection[int],
        good: Collection[str],
    ) -> dict[int, Allocation]:
        hosts = {
            number: infos[number]
            for number, allocation in enumerate(self._allocations)
            if number not in {*numbers, *gone}
            and isinstance(allocation, Reservation)
            and self._mpmd_idxs[number] < self.num_own
            and self._mpmd_idxs[number] != self._mpmd_idxs[numbers[0]]
            and infos[number].node_id in good
            and infos[number].node_id == self.node_of(allocation)  # and not where it was before it died
        }
        shares_with = {n: host for n, host in self.shares_with.items() if n not in numbers and host in hosts}
        guests = {number: len(infos[number].devices) for number in numbers}
        chosen = choose_hosts(guests, hosts, shares_with)
        return {
            guest: SharedDevices(hosts[host].node_id, host, hosts[host].accelerators)
            for guest, host in chosen.items()
        }

    # Requests.

    def _await_own(
        self, mpmd_idx: int, numbers: Sequence[int], seconds: float, check: Callable[[], None]
    ) -> dict[int, Allocation] | None:
        """Reservations for processes of a group; ``None``, and a request, if there are none yet."""
        deadline = time.monotonic() + seconds
        self._request(mpmd_idx, numbers)
        while self._state_of_request(mpmd_idx, self.good_nodes()) != "CREATED":
            check()
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)
            self._request(mpmd_idx, numbers)
        granted = self._requests.pop(mpmd_idx)
        return {n: Reservation(granted.placement_group, index) for index, n in enumerate(granted.numbers)}

    def _request(self, mpmd_idx: int, numbers: Sequence[int]) -> None:
        """Requests reservations for processes of a group, unless they wait for good ones."""
        waiting = self._requests.get(mpmd_idx)
        if waiting is not None:
            is_asked = waiting.numbers == tuple(numbers) and waiting.avoided == self.avoided
            state = self._state_of_request(mpmd_idx, self.good_nodes())
            if is_asked and state in ("PENDING", "PREPARED", "CREATED"):
                return
            self._withdraw(mpmd_idx)
        group = request([self._bundles[number] for number in numbers], self.avoided)
        self.placement_groups.add(group)
        self._requests[mpmd_idx] = _PendingReservations(tuple(numbers), group, self.avoided)

    def _renew_request(self, mpmd_idx: int, good: Collection[str]) -> None:
        """Requests reservations for a group that shares or leaves its node; else withdraws its request."""
        allocations = {number: self._allocations[number] for number in self.numbers_of(mpmd_idx)}
        waiting = [
            n for n, p in allocations.items() if isinstance(p, SharedDevices) or self.node_of(p) not in good
        ]
        if waiting and mpmd_idx < self.num_own:
            self._request(mpmd_idx, waiting)
        else:
            self._withdraw(mpmd_idx)

    def _withdraw(self, mpmd_idx: int) -> None:
        if waiting := self._requests.pop(mpmd_idx, None):
            self._remove(waiting.placement_group)

    @property
    def is_short(self) -> bool:
        return bool(self._requests)

    def request_spare(self, bundle: Mapping[str, float]) -> Reservation:
        """A reservation for a spare process, which may not be there yet."""
        with self._lock:
            group = request([bundle], self.avoided)
            self.placement_groups.add(group)
            return Reservation(group, 0)

    def give_back(self, others: Iterable[Allocation] = ()) -> None:
        """Removes placement groups that neither a process, a request nor an allocation in ``others`` uses."""
        with self._lock:
            allocations = [
                allocation
                for allocation in (*self._allocations, *others)
                if isinstance(allocation, Reservation)
            ]
            used = {allocation.placement_group for allocation in allocations}
            used |= {waiting.placement_group for waiting in self._requests.values()}
            for group in self.placement_groups - used:
                self._remove(group)

    def _remove(self, group: PlacementGroup) -> None:
        self.placement_groups.discard(group)
        self._nodes = {p: node for p, node in self._nodes.items() if p.placement_group != group}
        self._session.remove([group])


def choose_hosts(
    guests: Mapping[int, int], hosts: Mapping[int, ProcessInfo], shares_with: Mapping[int, int]
) -> dict[int, int]:
    """Chooses a host for each process without a reservation: the fitting process with the fewest guests.

    Guests on the host's node count first, then guests of the host itself. Processes are named by their
    numbers.

    Args:
      guests: the processes, and how many devices each needs.
      hosts: the processes that have devices of their own.
      shares_with: the processes that share with hosts already.
    Raises: ``LookupError`` when no host has as many devices as a process needs.
    """
    on_host = collections.Counter(shares_with.values())
    on_node = collections.Counter(hosts[host].node_id for host in shares_with.values() if host in hosts)
    chosen: dict[int, int] = {}
    for guest, num_devices in guests.items():
        fitting = [number for number, info in hosts.items() if len(info.devices) >= num_devices]
        if not fitting:
            raise LookupError(f"none of the processes that are left has {num_devices} devices to share")
        host = min(fitting, key=lambda i: (on_node[hosts[i].node_id], on_host[i], i))
        on_host[host] += 1
        on_node[hosts[host].node_id] += 1
        chosen[guest] = host
    return chosen
