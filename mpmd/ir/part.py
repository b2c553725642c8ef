"""The part of a mesh for which a plan is."""

from __future__ import annotations

import dataclasses

from mpmd.util.tables import first_few


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a mesh.

    Attributes:
      name: the name of the part.
      mpmd_idxs: for each group of the part, numbered from 0, its number in the mesh.
    """

    name: str
    mpmd_idxs: tuple[int, ...]

    def __str__(self) -> str:
        numbers, groups = range(len(self.mpmd_idxs)), self.mpmd_idxs
        if len(groups) == 1:
            return f"part {self.name!r}: its group 0 is group {groups[0]} of the mesh"
        return (
            f"part {self.name!r}: its groups {first_few(map(str, numbers))} are groups "
            f"{first_few(map(str, groups))} of the mesh"
        )


def part_lines(part: Part | None) -> list[str]:
    return [] if part is None else [str(part)]
