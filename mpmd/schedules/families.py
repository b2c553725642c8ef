"""The families of schedules by name, for tools in which a user chooses one."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from mpmd.schedules.base import RoundRobin, Schedule, VShaped
from mpmd.schedules.dualpipe import DualPipeV
from mpmd.schedules.forward_only import ForwardOnly
from mpmd.schedules.gpipe import GPipe, InterleavedGPipe, LoopedBFS
from mpmd.schedules.interleaved import Interleaved1F1B, KimiK2
from mpmd.schedules.list_schedule import ListSchedule
from mpmd.schedules.one_f_one_b import Eager1F1B, Std1F1B
from mpmd.schedules.seq_1f1b import Seq1F1B
from mpmd.schedules.v_shaped import VHalf, VMin, ZeroBubbleV
from mpmd.schedules.zero_bubble import InterleavedZeroBubble, ZeroBubble, ZeroBubbleH2


@dataclasses.dataclass(frozen=True)
class Family:
    """The schedules of one class, of all sizes.

    Attributes:
      schedule: the class.
      stages_per_group: the number of stages of a group by default.
    """

    schedule: type[Schedule]
    stages_per_group: int

    @property
    def name(self) -> str:
        return self.schedule.__name__

    @property
    def has_slices(self) -> bool:
        return "slices" in {field.name for field in dataclasses.fields(self.schedule)}

    def build(self, mpmd_dim: int | None = None, num_stages: int | None = None, slices: int = 1) -> Schedule:
        """The schedule of a size; a number that is left out follows from the other one.

        Raises ``ValueError`` without both numbers, and for a size or slices that the class does not have; the
        message says which it has.
        """
        if mpmd_dim is None:
            if num_stages is None:
                raise ValueError(f"{self.name} needs a size: mpmd_dim, num_stages or both")
            # Rounded up, so that the class refuses a number of stages that does not fit.
            mpmd_dim = -(-num_stages // self.stages_per_group)
        if num_stages is None:
            num_stages = mpmd_dim * self.stages_per_group
        schedule = self.schedule.of_size(num_stages, mpmd_dim)
        if slices == 1:
            return schedule
        if not self.has_slices:
            sliced = ", ".join(name for name, family in ALL_FAMILIES.items() if family.has_slices)
            raise ValueError(f"{self.name} does not cut microbatches into slices; {sliced} do")
        changes: dict[str, Any] = {"slices": slices}
        return dataclasses.replace(schedule, **changes)


FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {
        schedule.__name__: Family(schedule, 2 if issubclass(schedule, RoundRobin | VShaped) else 1)
        for schedule in (
            GPipe,
            Std1F1B,
            Eager1F1B,
            ZeroBubble,
            ZeroBubbleH2,
            InterleavedGPipe,
            LoopedBFS,
            Interleaved1F1B,
            KimiK2,
            InterleavedZeroBubble,
            ZeroBubbleV,
            VHalf,
            VMin,
            DualPipeV,
            ListSchedule,
            ForwardOnly,
        )
    }
)
"""The families that run any step, by the names of their classes."""

ALL_FAMILIES: Mapping[str, Family] = types.MappingProxyType({**FAMILIES, "Seq1F1B": Family(Seq1F1B, 1)})
"""These and the family for steps that are written over slices of a sequence."""


def build(name: str, mpmd_dim: int | None = None, num_stages: int | None = None, slices: int = 1) -> Schedule:
    """Builds a schedule of the family ``name``, in upper or lower case; see ``Family.build``.

    Raises ``ValueError`` for an unknown family; the message lists all families.
    """
    matches = [family for family in ALL_FAMILIES.values() if family.name.lower() == name.lower()]
    if not matches:
        raise ValueError(f"there is no schedule {name!r}; there are {', '.join(ALL_FAMILIES)}")
    return matches[0].build(mpmd_dim, num_stages, slices)
