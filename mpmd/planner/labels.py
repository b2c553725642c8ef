"""Labels of the alternatives to a pipeline: one group, whose devices share the work in one way. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.layer_profile import Kind

ALTERNATIVES: dict[str, tuple[Kind | None, bool]] = {
    "one device": (None, False),
    "data parallel": ("data", False),
    "FSDP": ("data", True),
    "tensor parallel": ("model", False),
}
"""For each label, the axis of all devices, and whether weights are divided over it."""


def alternative(candidate: Candidate) -> str:
    """The label of a candidate that is an alternative to a pipeline; empty for any other."""
    if len(candidate.submeshes) > 1:
        return ""
    axes = [kind for kind, size in candidate.submeshes[0].items() if size > 1]
    if len(axes) > 1:
        return ""
    axis = axes[0] if axes else None
    return next((label for label, of_label in ALTERNATIVES.items() if of_label == (axis, candidate.fsdp)), "")


def relabelled(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Labels the first row of each alternative to a pipeline; other labels stay.

    Args:
      rows: the best first.
    """
    labelled: list[Row] = []
    for row in rows:
        label = row.label
        if label in ALTERNATIVES or not label:
            label = alternative(row.candidate)
            label = "" if any(label == other.label for other in labelled) else label
        labelled.append(dataclasses.replace(row, label=label))
    return tuple(labelled)
