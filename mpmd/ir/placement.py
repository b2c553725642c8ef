"""The placement of an array, as data."""

from __future__ import annotations

import dataclasses

from mpmd.ir.plan import Spec
from mpmd.ir.stack import Stack


@dataclasses.dataclass(frozen=True)
class Placement:
    """The groups that hold an array, and its spec within each; without groups, the placement is open.

    Attributes:
      stack: the array's cut into layer ranges; ``None``: the array is one value, or the cut is open.
      range_idxs: the groups of each layer range; ``mpmd_idxs`` has all these groups.
    """

    mpmd_idxs: tuple[int, ...] = ()
    spec: Spec | None = None
    stack: Stack | None = None
    range_idxs: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_ranges(cls, stack: Stack, range_idxs: tuple[tuple[int, ...], ...], spec: Spec | None) -> Placement:
        groups = sorted({group for groups in range_idxs for group in groups})
        return cls(tuple(groups), spec, stack, range_idxs)

    @property
    def ranges(self) -> tuple[Placement, ...]:
        """The placement of each layer range; for an array that is one value, the placement itself."""
        if self.stack is None:
            return (self,)
        return tuple(Placement(groups, self.spec) for groups in self.range_idxs)


ANYWHERE = Placement()
