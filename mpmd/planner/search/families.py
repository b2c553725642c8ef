"""The families of schedules that a search looks at, by name.

The families are the schedules of ``mpmd.schedules``, and families of slices. A family of slices has a name
for each combination of options. Its schedules cut microbatches into as many slices as the loss is written
with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from mpmd.schedules import FAMILIES, GPipe, Schedule, Seq1F1B

GPIPE_OF_SLICES = "GPipe of slices"

_SEQ_1F1B: Mapping[str, Mapping[str, Any]] = {
    " ".join(["Seq1F1B", *["eager"] * eager, *["split"] * split]): {"eager": eager, "split_backward": split}
    for eager, split in itertools.product((False, True), repeat=2)
}
SLICED = (*_SEQ_1F1B, GPIPE_OF_SLICES)


def family_of(schedule: Schedule) -> str:
    """The name of a schedule's family; the name of its class, if no search looks at the family."""
    if isinstance(schedule, Seq1F1B):
        options = {"eager": schedule.eager, "split_backward": schedule.split_backward}
        return next(name for name, of_family in _SEQ_1F1B.items() if of_family == options)
    return GPIPE_OF_SLICES if isinstance(schedule, GPipe) and schedule.slices > 1 else schedule.name


def with_options(family: str) -> tuple[str, ...]:
    return tuple(_SEQ_1F1B) if family == Seq1F1B.__name__ else (family,)


def build(family: str, groups: int, num_stages: int, slices: int) -> Schedule:
    """The schedule of a family and size.

    Args:
      slices: of a microbatch, for a family of slices.

    Raises: ``ValueError`` for a size that the family does not have.
    """
    if family in _SEQ_1F1B:
        return Seq1F1B(num_stages, slices, groups, **_SEQ_1F1B[family])
    if family == GPIPE_OF_SLICES:
        return FAMILIES["GPipe"].build(groups, num_stages, slices)
    return FAMILIES[family].build(groups, num_stages)
