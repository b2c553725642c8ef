"""What the process of a group reports about itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GroupInfo:
    """Where a group runs, and what it offers.

    Attributes:
      mpmd_idx: the group.
      node: the address of its node.
      node_id: Ray's identifier of the node; several nodes may share an address.
      pid: the number of its process on that node.
      devices: its devices, as JAX prints them.
      transports: the transports that its process can use, the best first.
    """

    mpmd_idx: int
    node: str
    node_id: str
    pid: int
    devices: tuple[str, ...]
    transports: tuple[str, ...]
