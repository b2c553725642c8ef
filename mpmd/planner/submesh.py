"""The devices of a group: their pool, and their number by axis. A value that can be hashed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

from mpmd.planner.layer_profile import Kind

INNERMOST_FIRST: tuple[Kind, ...] = ("model", "sequence", "data")
"""The axes of a submesh; devices that are neighbours along the first one have consecutive numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Submesh(Mapping[Kind, int]):
    """The number of devices of a group along each axis, a mapping of the axes ``INNERMOST_FIRST``.

    Attributes:
      pool: the name of the pool of the cluster in which the devices are; empty in a cluster of one kind.
    """

    model: int = 1
    sequence: int = 1
    data: int = 1
    pool: str = ""

    @classmethod
    def of(cls, sizes: Mapping[Kind, int], pool: str = "") -> Self:
        of_axes: dict[str, Any] = {str(kind): size for kind, size in sizes.items()}
        return cls(**of_axes, pool=pool)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.model, self.sequence, self.data

    @property
    def num_devices(self) -> int:
        return self.model * self.sequence * self.data

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Submesh):
            return (self.sizes, self.pool) == (other.sizes, other.pool)
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.sizes, self.pool))

    def __getitem__(self, kind: Kind) -> int:
        return self.sizes[INNERMOST_FIRST.index(kind)]

    def __iter__(self) -> Iterator[Kind]:
        return iter(INNERMOST_FIRST)

    def __len__(self) -> int:
        return len(INNERMOST_FIRST)
