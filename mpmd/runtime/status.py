"""The groups of one process at one moment, as a table."""

from __future__ import annotations

import dataclasses

from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import table


@dataclasses.dataclass(frozen=True)
class GroupStatus:
    """A group at one moment.

    Attributes:
      mpmd_idx: the group.
      devices: of its submesh, by JAX's names.
      state: its activity, with the step and the duration.
      pending: how many calls it has not begun: steps, and values to fetch.
    """

    mpmd_idx: int
    devices: tuple[str, ...]
    state: str
    pending: int


@dataclasses.dataclass(frozen=True, repr=False)
class Status(ShownAsText):
    """The groups of an ``MpmdMesh`` at one moment; prints as a table."""

    groups: tuple[GroupStatus, ...]

    def __str__(self) -> str:
        rows = [
            (str(group.mpmd_idx), ", ".join(group.devices), str(group.pending), group.state)
            for group in self.groups
        ]
        return table(("group", "devices", "pending", "state"), rows)
