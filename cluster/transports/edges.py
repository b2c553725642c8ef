"""Which way messages go on which edge."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax

from cluster.info import GroupInfo
from cluster.transports.device import DeviceTransport
from cluster.transports.inbox import Inbox
from cluster.transports.object_store import ObjectStoreTransport
from cluster.transports.shared_memory import SharedMemoryTransport
from cluster.wire import Packed
from mpmd.runtime.transport import Array, MessageId

AUTO = "auto"
OBJECT_STORE = "object_store"
NAMES = ("shared_memory", "device", OBJECT_STORE)

_TRANSFER_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def offered(platform: str) -> tuple[str, ...]:
    """The transports that a process with devices of ``platform`` can use, the best first."""
    names = []
    if sys.platform == "linux":
        names = ["device"] if platform in _TRANSFER_PLATFORMS else []
        # Host memory is where a CPU computes, and a detour for an accelerator.
        names.insert(0 if platform == "cpu" else len(names), "shared_memory")
    return (*names, OBJECT_STORE)


def check_name(transport: str) -> None:
    """Raises ``ValueError`` when there is no such transport."""
    if transport not in (AUTO, *NAMES):
        raise ValueError(f"transport must be one of {', '.join((AUTO, *NAMES))}, not {transport!r}")


def choose(transport: str, groups: Sequence[GroupInfo]) -> dict[tuple[int, int], str]:
    """For each pair of groups, lower index first, the way their messages go, in both directions.

    ``auto`` takes the best that both offer, shared memory only within a node.

    Raises: ``ValueError`` when ``transport`` does not lead from one group to another, with every such pair.
    """
    pairs = [(a, b) for a in groups for b in groups if a.mpmd_idx < b.mpmd_idx]
    chosen, faults = {}, []
    for a, b in pairs:
        usable = [name for name in a.transports if name in b.transports]
        if a.node_id != b.node_id:
            usable = [name for name in usable if name != "shared_memory"]
        if transport not in (AUTO, *usable):
            faults.append(f"groups {a.mpmd_idx} and {b.mpmd_idx} can use {', '.join(usable)}")
        chosen[a.mpmd_idx, b.mpmd_idx] = usable[0] if transport == AUTO else transport
    if faults:
        raise ValueError(
            f"transport {transport!r} does not connect all groups: {'; '.join(faults)}. "
            f"Use transport={AUTO!r}, which takes the best for each pair"
        )
    return chosen


class Carrier(Protocol):
    """One way for messages to go from process to process: sends them, and puts what arrives into an inbox."""

    def listen(self, host: str, secret: bytes) -> Any:
        """Gets ready for peers to connect, where TCP is used at ``host``. Returns the address for them."""
        ...

    def connect(self, addresses: Mapping[int, Any]) -> None:
        """Connects with peers, by ``mpmd_idx``, all of which have listened, and connect too."""
        ...

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        """As in ``mpmd.runtime.transport.Transport``."""
        ...

    def close(self) -> None:
        """Afterwards the peers take this group for dead."""
        ...


class Edges:
    """All edges of one group, each with its carrier. Implements ``mpmd.runtime.transport.Transport``.

    Args:
      mpmd_idx: the group.
      submesh: its devices.
    """

    def __init__(self, mpmd_idx: int, submesh: jax.sharding.Mesh):
        self._inbox = Inbox()
        self._object_store = ObjectStoreTransport(self._inbox)
        self._shared_memory = SharedMemoryTransport(self._inbox, mpmd_idx)
        self._carriers: dict[str, Carrier] = {
            "shared_memory": self._shared_memory,
            "device": DeviceTransport(self._inbox, mpmd_idx, submesh),
            OBJECT_STORE: self._object_store,
        }
        self._routes: dict[int, Carrier] = {}

    def listen(self, names: Iterable[str], host: str, secret: bytes) -> dict[str, Any]:
        """Gets the named carriers ready. Returns the address of each."""
        return {name: self._carriers[name].listen(host, secret) for name in names}

    def connect(self, routes: Mapping[int, str], addresses: Sequence[Mapping[str, Any]]) -> None:
        """Connects with every peer, by the carrier that ``routes`` names; ``addresses`` are all groups'."""
        for name, carrier in self._carriers.items():
            if peers := [peer for peer, chosen in routes.items() if chosen == name]:
                carrier.connect({peer: addresses[peer][name] for peer in peers})
        self._routes = {peer: self._carriers[name] for peer, name in routes.items()}

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        self._routes[message.dst].send(message, arrays)

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        return self._inbox.take(message).open(shardings)

    def deliver(self, message: MessageId, packed: Sequence[Packed]) -> None:
        """Takes in what another group's actor brings through the object store."""
        self._object_store.deliver(message, packed)

    def abort(self, step: int, reason: str) -> None:
        self._inbox.abort(step, reason)

    def trim(self) -> None:
        """Gives memory back that no message is in; what is still needed is made again."""
        self._shared_memory.trim()

    def close(self) -> None:
        for carrier in set(self._routes.values()):
            carrier.close()
        self._inbox.close()
