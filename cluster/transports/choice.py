"""The choice of a transport for each two processes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.protocol.process_info import ProcessInfo
from mpmd.ir.plan import Edge
from mpmd.memory import Holding
from mpmd.validation import Fault

AUTO = "auto"
SHARED_MEMORY = "shared_memory"
NETWORK = "network"
DEVICE = "device"
OBJECT_STORE = "object_store"
TCP = "tcp"
"""The name under which a process announces its port for TCP connections; not the name of a transport."""

NAMES = (SHARED_MEMORY, NETWORK, DEVICE, OBJECT_STORE)

_TRANSFER_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def supported(platform: str) -> tuple[str, ...]:
    """The transports that a process with devices of ``platform`` can use, the best first."""
    if sys.platform != "linux":
        return (OBJECT_STORE,)
    return tuple(name for name in NAMES if name != DEVICE or platform in _TRANSFER_PLATFORMS)


def transport_fault(name: str, transport: Any) -> ValueError | None:
    if transport in (AUTO, *NAMES):
        return None
    return ValueError(f"{name} must be one of {', '.join((AUTO, *NAMES))}, not {transport!r}")


def encryption_fault(encryption: Any, transport: str) -> Fault | None:
    if encryption is not None and not isinstance(encryption, bool):
        return TypeError(f"encryption must be True, False or None, not {encryption!r}")
    if encryption and transport in (DEVICE, OBJECT_STORE):
        return ValueError(
            f"transport {transport!r} does not encrypt what groups send one another: use {NETWORK!r}, or the "
            "encryption of the network, or for the object store Ray's"
        )
    return None


def choose(transport: str, processes: Sequence[ProcessInfo]) -> dict[tuple[int, int], str]:
    """The transport between each two processes of different groups, in both directions.

    ``auto`` takes the best that both can use, but never ``device``: that one opens a port at which strangers
    can end the process, so it is for networks that are trusted, and who asks for it by name says so.
    ``shared_memory`` is possible only within a node.

    Args:
      processes: of all groups, group by group.

    Returns: the names of transports by the positions of both processes, the lower one first.
    Raises: ``ValueError`` when ``transport`` cannot connect all groups; it lists every such pair.
    """
    chosen: dict[tuple[int, int], str] = {}
    faults: dict[str, None] = {}
    for (i, a), (j, b) in itertools.combinations(enumerate(processes), 2):
        if a.mpmd_idx == b.mpmd_idx:
            continue  # XLA connects them
        usable = [name for name in a.transports if name in b.transports]
        if a.node_id != b.node_id:
            usable = [name for name in usable if name != SHARED_MEMORY]
        if transport not in (AUTO, *usable):
            faults[f"groups {a.mpmd_idx} and {b.mpmd_idx} can use {', '.join(usable)}"] = None
        best = next(name for name in usable if name != DEVICE)
        chosen[i, j] = best if transport == AUTO else transport
    if faults:
        raise ValueError(
            f"transport {transport!r} does not connect all groups: {'; '.join(faults)}. "
            f"Use transport={AUTO!r}, which takes the best for each pair"
        )
    return chosen


def holdings(
    chosen: Mapping[tuple[int, int], str], processes: Sequence[ProcessInfo], platform: str
) -> dict[Edge, Holding]:
    """The kind of device memory, if any, that holds each edge's messages until they are used.

    If the processes of two groups are connected by several transports, the transport with most memory counts.

    Args:
      chosen: the result of ``choose``.
      platform: the platform of the groups' devices.
    """
    by_memory = [Holding.ELSEWHERE, Holding.COPIED, Holding.KEPT, Holding.SLOTS]
    holding_of: dict[Edge, Holding] = {}
    for (i, j), name in chosen.items():
        a, b = processes[i].mpmd_idx, processes[j].mpmd_idx
        for edge in ((a, b), (b, a)):
            so_far = holding_of.get(edge, Holding.ELSEWHERE)
            holding_of[edge] = max(so_far, holding_by(name, platform), key=by_memory.index)
    return holding_of


def holding_by(transport: str, platform: str) -> Holding:
    if transport == DEVICE:
        return Holding.COPIED
    rules = {SHARED_MEMORY: Holding.SLOTS, NETWORK: Holding.KEPT} if platform == "cpu" else {}
    return rules.get(transport, Holding.ELSEWHERE)
