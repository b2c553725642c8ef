"""The note on plain attention, where it takes long by the formulas."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.planner.hardware import Hardware, seconds_by_part
from mpmd.planner.layer_profile import LayerProfile, TaskWork

LEAST_SHARE = 0.1
"""The least share of the time that devices compute for which attention is noted."""


def attention_note(profiles: Sequence[LayerProfile], pool: Hardware) -> list[str]:
    """A note on plain attention if it takes more than ``LEAST_SHARE`` of the time that devices compute."""
    attention = sum(_seconds(profile.attention, pool) for profile in profiles)
    layers = [layer for profile in profiles for layer in profile.layers]
    whole = sum(_seconds(work, pool) for layer in layers for work in (layer.forward, layer.backward))
    if attention <= LEAST_SHARE * whole:
        return []
    return [
        f"plain attention takes {attention / whole:.0%} of the time that devices compute: a kernel of flash "
        "attention holds no scores in memory (flash_attention= of the cluster, or mpmd.cost)"
    ]


def _seconds(work: TaskWork, pool: Hardware) -> float:
    beside = work.nbytes_beside
    return float(
        sum(seconds_by_part(pool, work.operations, work.nbytes - beside, beside, work.products, work.kernels))
    )
