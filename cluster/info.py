"""What the groups' processes tell of themselves."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GroupInfo:
    """Where a group lives.

    Attributes:
      mpmd_idx: the group.
      node: its node's address.
      node_id: Ray's name of the node; nodes may share an address.
      pid: its process there.
      devices: its devices as JAX prints them.
      transports: the ways in which its process can exchange messages, the best first.
    """

    mpmd_idx: int
    node: str
    node_id: str
    pid: int
    devices: tuple[str, ...]
    transports: tuple[str, ...]
