"""Simulations as tables of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mpmd.render.chart import Chart
from mpmd.simulate import Simulation


def group_table(simulation: Simulation) -> str:
    """For each group of a simulated schedule its stages, how busy it is, what it holds, and why it is idle::

        group  stages   busy  peak  longest idle
            0  0       75.0%     2  2 from 2 on: waits for bwd_1__0 of group 1
            1  1       75.0%     1  2 from 10 on: nothing left to do

    The peak is in residuals of a microbatch of as many stages as a group has on average.
    """
    chart = Chart.of(simulation)
    # The last one of a group stays: the first of the longest.
    gaps = sorted(simulation.gaps, key=lambda gap: (gap.end - gap.start, -gap.start))
    longest = {gap.mpmd_idx: gap for gap in gaps}
    rows: list[Sequence[str]] = [("group", "stages", "busy", "peak", "longest idle")]
    for mpmd_idx, (stages, busy, peak) in enumerate(zip(chart.stages, chart.busy, chart.peaks, strict=True)):
        gap = longest.get(mpmd_idx)
        idle = f"{gap.end - gap.start:.4g} from {gap.start:.4g} on: {gap.reason}" if gap else ""
        rows.append((str(mpmd_idx), ", ".join(map(str, stages)), f"{busy:.1%}", chart.amount(peak), idle))
    return aligned(rows, left={1, 4})


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """The rows with their columns to the right, but for those in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
