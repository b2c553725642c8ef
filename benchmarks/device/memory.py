"""The section of memory: the planned peak of each group beside that of its allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

import mpmd
from benchmarks.device.gpt_step import GptStep, gpt_step, size_of
from benchmarks.device.groups import in_process, local_ray, on_ray
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Table
from mpmd.util.tables import human_bytes

GROUPS = 4
STEPS = 3


class Peak(NamedTuple):
    """The most bytes that a group needs on a device; ``measured`` is ``None`` if nothing counts them."""

    where: str
    group: int
    planned: int
    measured: int | None


def run(settings: Settings) -> Findings:
    """One group in this process, and four on Ray, after some steps."""
    size = size_of(settings)
    with in_process(1) as mesh:
        peaks = peaks_of("1 group in process", gpt_step(size, 1), mesh)
    with local_ray(settings), on_ray(settings, GROUPS) as mesh:
        peaks += peaks_of(f"{GROUPS} groups on Ray", gpt_step(size, GROUPS), mesh)
    return findings_of(peaks)


def peaks_of(where: str, step: GptStep, mesh) -> list[Peak]:
    """Runs steps, and asks each group."""
    compiled = mpmd.jit(step.function, mesh, donate_argnums=0).compile(step.state, *step.batch)
    state = step.state
    for _ in range(STEPS):
        state, loss = compiled(state, *step.batch)
    jax.block_until_ready((state, loss))
    return [
        Peak(where, group.mpmd_idx, group.peak_bytes, group.measured_peak_bytes)
        for group in compiled.report().groups
    ]


def findings_of(peaks: Sequence[Peak]) -> Findings:
    """The table of all groups."""
    rows = [
        (
            f"{peak.where}, group {peak.group}",
            human_bytes(peak.planned),
            "not counted" if peak.measured is None else human_bytes(peak.measured),
            "" if peak.measured is None else f"{peak.measured / peak.planned:.2f}",
        )
        for peak in peaks
    ]
    table = Table("Memory of a device", ("", "planned peak", "allocator's peak", "ratio"), tuple(rows))
    return Findings((table,), [peak._asdict() for peak in peaks])
