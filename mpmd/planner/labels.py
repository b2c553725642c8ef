"""The names of the alternatives to a pipeline: one group, whose devices share the work in one way. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.profile import Kind

ALTERNATIVES: dict[str, tuple[Kind | None, bool]] = {
    "one device": (None, False),
    "data parallel": ("data", False),
    "FSDP": ("data", True),
    "tensor parallel": ("model", False),
}
"""By label, the axis along which all devices are, and whether weights are divided over it."""


def alternative(candidate: Candidate) -> str:
    """Which of the alternatives a candidate is; empty for any other."""
    if len(candidate.submeshes) > 1:
        return ""
    axes = [kind for kind, size in candidate.submeshes[0].items() if size > 1]
    way = (axes[0] if axes else None, candidate.fsdp)
    return next((label for label, own in ALTERNATIVES.items() if own == way and len(axes) <= 1), "")


def relabelled(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows, the best first, where the first one of each alternative has its label. Other labels stay."""
    found: list[Row] = []
    for row in rows:
        label = row.label
        if label in ALTERNATIVES or not label:
            label = alternative(row.candidate)
            label = "" if any(label == other.label for other in found) else label
        found.append(dataclasses.replace(row, label=label))
    return tuple(found)
