"""Summarises simulations as tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.render.chart import Chart
from mpmd.simulate import Simulation
from mpmd.util.tables import aligned


def group_table(simulation: Simulation, slices: int = 1) -> str:
    """For each group of a simulated schedule: its stages, busy time, peak memory, and longest idle time::

        group  stages   busy  peak  longest idle
            0  0       75.0%     2  2 from 2 on: waits for bwd_1__0 of group 1
            1  1       75.0%     1  2 from 10 on: nothing left to do

    The peak is in residuals of a microbatch of as many stages as a group has on average.
    """
    chart = Chart.of(simulation, slices=slices)
    # The dictionary keeps the last gap of a group, which is the first of its longest ones.
    gaps = sorted(simulation.gaps, key=lambda gap: (gap.end - gap.start, -gap.start))
    longest = {gap.mpmd_idx: gap for gap in gaps}
    rows: list[Sequence[str]] = [("group", "stages", "busy", "peak", "longest idle")]
    for mpmd_idx, (stages, busy, peak) in enumerate(zip(chart.stages, chart.busy, chart.peaks, strict=True)):
        on_group = sorted({chart.numbers.stage_of(number) for number in stages})
        gap = longest.get(mpmd_idx)
        idle = f"{gap.end - gap.start:.4g} from {gap.start:.4g} on: {gap.reason}" if gap else ""
        rows.append(
            (str(mpmd_idx), ", ".join(map(str, on_group)), f"{busy:.1%}", chart.memory_text(peak), idle)
        )
    return "\n".join(aligned(rows, left={1, 4}))
