"""The report of an actor's process on itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from cluster.protocol.versions import Versions


class Location(NamedTuple):
    """``port`` is free for the group's processes to meet; ``None`` where another process has the port."""

    node: str
    node_id: str
    port: int | None
    versions: Versions


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """A process of a group: where it runs, and which devices and transports it has.

    Attributes:
      mpmd_idx: the group.
      rank: its number among the processes of the group.
      node: the address of its node.
      node_id: Ray's identifier of the node; several nodes may share an address.
      pid: the number of the process on that node.
      devices: its own devices, as JAX prints them.
      transports: the transports that it can use, the best first.
      log: the file on its node to which its stderr is written; empty if unknown.
      accelerators: its own devices, as Ray names them; empty on CPU.
      shares_with: the group whose devices it uses, for lack of a place of its own; else ``None``.
    """

    mpmd_idx: int
    rank: int
    node: str
    node_id: str
    pid: int
    devices: tuple[str, ...]
    transports: tuple[str, ...]
    log: str = ""
    accelerators: tuple[str, ...] = ()
    shares_with: int | None = None


@dataclasses.dataclass
class ProcessPlacement:
    """The processes of a mesh, group by group, and the transports between them. Recovery changes it.

    Attributes:
      transports: the transport between each two processes of different groups, by their positions.
    """

    processes: tuple[ProcessInfo, ...]
    transports: Mapping[tuple[int, int], str]
