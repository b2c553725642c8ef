"""Schedules with split backwards: closed forms of their makespan and memory, for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.render import schedule_grid
from mpmd.schedules import (
    DualPipeV,
    InterleavedZeroBubble,
    VHalf,
    VMin,
    ZeroBubble,
    ZeroBubbleH2,
    ZeroBubbleV,
)
from mpmd.simulate import Costs, Link, simulate
from tests.support.lists import figures, waits

groups = st.integers(1, 5)
stages_per_group = st.integers(1, 3)
microbatches = st.integers(1, 12)
times = st.sampled_from([0.25, 0.5, 1, 1.75, 3])


def shortest(p, v, m):
    """The makespan of all zero-bubble schedules: of the busiest group, or of the longest chain."""
    if m >= p:
        return 3 * v * m + p - 1
    return 2 * v * p + 2 * m - 1 + (v - 1) * max(0, 2 * m - p)


@given(p=groups, m=microbatches)
def test_zero_bubble_has_the_memory_of_1f1b(p, m):
    lists = ZeroBubble(p).tasks(m)
    assert figures(lists) == (shortest(p, 1, m), [min(p, m)] * p)
    until_bwd_a = simulate(lists, Costs(held_for_bwdw=0.0)).peaks
    assert until_bwd_a == tuple(min(p - i, m) for i in range(p))


@given(p=groups, extra=st.integers(0, 12), fwd=times, bwd_a=times, bwd_w=times)
def test_the_bubble_of_zero_bubble_for_any_times(p, extra, fwd, bwd_a, bwd_w):
    m, lasts = p + extra, {"fwd": fwd, "bwdA": bwd_a, "bwdW": bwd_w}
    simulated = simulate(ZeroBubble(p).tasks(m), Costs(lasts))
    bubble = (p - 1) * max(fwd, bwd_a, fwd + bwd_a - bwd_w)
    assert simulated.makespan == m * (fwd + bwd_a + bwd_w) + bubble


@given(p=groups, m=microbatches, extra=st.integers(0, 10))
def test_zero_bubble_h2_turns_memory_into_less_waiting(p, m, extra):
    limit = min(p + extra, 2 * p - 1)
    lists = ZeroBubbleH2(p, memory_limit=p + extra).tasks(m)
    assert figures(lists) == (shortest(p, 1, m), [min(limit, m)] * p)
    if m >= limit:
        assert max(waits(simulate(lists))) == 2 * p - 1 - limit


@given(p=groups, extra=st.integers(0, 12), c=st.sampled_from([0.25, 0.5, 1]))
def test_with_enough_microbatches_latency_is_paid_once(p, extra, c):
    def paid(schedule):
        lists = schedule.tasks(2 * p - 1 + extra)
        return simulate(lists, Costs(link=Link(c))).makespan - simulate(lists).makespan

    assert paid(ZeroBubbleH2(p)) == (p - 1) * c
    assert paid(ZeroBubbleV(2 * p, p)) == 5 * (p - 1) * c
    if 2 * c <= 1:  # no longer there and back than the weight gradient in between
        assert paid(ZeroBubble(p)) <= 4 * (p - 1) * c


def test_zero_bubble_h2_lies_between_zero_bubble_and_no_waiting_at_all():
    assert ZeroBubbleH2(4, memory_limit=4).tasks(9) == ZeroBubble(4).tasks(9)
    assert ZeroBubbleH2(4).tasks(9) == ZeroBubbleH2(4, memory_limit=7).tasks(9)
    assert schedule_grid(ZeroBubbleH2(2).tasks(4)) == (
        "0  F0 F1 F2 A0 W0 F3 A1 W1 A2 W2 A3 W3 .\n"
        "1  .  F0 A0 F1 A1 F2 A2 W0 F3 A3 W1 W2 W3"
    )  # fmt: skip


@given(p=groups, v=stages_per_group, m=microbatches)
def test_interleaved_zero_bubble_needs_less_memory_than_interleaved_1f1b(p, v, m):
    lists = InterleavedZeroBubble(p * v, p).tasks(m)
    first_round = -(-m // max(1, m // p))
    held = [min(v * m, (v - 1) * first_round + p)] * p
    assert figures(lists) == (shortest(p, v, m), held)


@given(p=groups, m=microbatches)
def test_zero_bubble_v_has_the_memory_of_1f1b_evenly_and_no_waiting(p, m):
    lists = ZeroBubbleV(2 * p, p).tasks(m)
    assert figures(lists) == (shortest(p, 2, m), [2 * min(p, m)] * p)
    if m >= 2 * p - 1:
        assert waits(simulate(lists)) == [0] * p


def test_zero_bubble_v_goes_down_and_up():
    assert schedule_grid(ZeroBubbleV(4, 2).tasks(3)) == (
        "0  0F0 0F1 0F2 3F0 3A0 3W0 3F1 3A1 3W1 0A0 0W0 3F2 3A2 0A1 3W2 0A2 0W1 0W2 .\n"
        "1  .   1F0 2F0 1F1 2F1 2A0 2W0 1F2 1A0 1W0 2F2 2A1 1A1 2A2 1A2 2W1 1W1 2W2 1W2"
    )


@pytest.mark.parametrize(
    ("schedule", "held", "slowdown"),
    [
        (VHalf, lambda p: 2 * ((p + 2) // 2), lambda p: 3 * p - 3 - p % 2),
        (VMin, lambda p: 2 * ((p + 4) // 3), lambda p: 4 * p - 5 + 2 * (p % 3 == 0)),
    ],
)
@given(p=groups, m=microbatches)
def test_v_half_and_v_min_pay_for_memory_with_a_bubble(schedule, held, slowdown, p, m):
    lists = schedule(2 * p, p).tasks(m)
    if 2 * min(p, m) <= held(p):
        assert lists == ZeroBubbleV(2 * p, p).tasks(m)
    else:
        makespan, peaks = figures(lists)
        assert (makespan, max(peaks)) == (6 * m + slowdown(p), held(p))


@given(p=groups, m=microbatches)
def test_dual_pipe_v_loses_what_fused_tasks_hold_back(p, m):
    lists = DualPipeV(2 * p, p).tasks(m)
    if m < 2 * p:
        assert lists == ZeroBubbleV(2 * p, p).tasks(m)
    else:
        assert figures(lists) == (6 * m + p - 1, [2 * p + 1] * p)
        assert simulate(lists, Costs(atomic=True)).makespan == 6 * m + 2 * (p - 1)


@given(p=groups, m=microbatches)
def test_dual_pipe_v_overlaps_all_but_the_ends(p, m):
    overlapped = [
        sum({"fwd", "bwdA"} <= {task.kind for task in cell.tasks} for cell in cells)
        for cells in DualPipeV(2 * p, p).tasks(m)
    ]
    if m >= 2 * p:
        assert overlapped == [2 * m - 3 * p + 1 + i - (i == p - 1) for i in range(p)]
