"""Simulated steps: what holds of every step, and small ones whose times are counted by hand.

``tests/schedules`` has the makespan and the peaks of every family of schedules, for all sizes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.ir.events import Event, Wait
from mpmd.ir.plan import Cell, OutsideTask, Task, TaskKind, parse_task
from mpmd.ir.slices import SliceNumbers
from mpmd.schedules import Eager1F1B, GPipe, Interleaved1F1B, Std1F1B, ZeroBubble, from_text
from mpmd.schedules.check import makes, needs
from mpmd.simulate import Costs, Gap, Link, simulate

LATENCY = Link(latency=0.25)

groups = st.integers(1, 6)
stages_per_group = st.integers(1, 4)
microbatches = st.integers(1, 12)
# Halves and quarters add up exactly.
times = st.sampled_from([0.25, 0.5, 1.0, 1.75, 3.0])
latencies = st.sampled_from([0.25, 0.5, 1.0])
links = st.builds(Link, st.sampled_from([0.0, 0.25, 2.0]), st.sampled_from([0.5, 1.0, 4.0, math.inf]))


@st.composite
def any_lists(draw: st.DrawFn) -> list[list[Cell]]:
    """A schedule of any kind and size."""
    p, v, m = draw(groups), draw(stages_per_group), draw(microbatches)
    schedules = [GPipe(p), Std1F1B(p), Eager1F1B(p), Interleaved1F1B(p * v, p), ZeroBubble(p)]
    return draw(st.sampled_from(schedules)).tasks(m)


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    """Times that differ by kind and stage, links that differ by edge, fused cells that run either way."""
    kinds = get_args(TaskKind)
    return Costs(
        kinds={kind: draw(times) for kind in kinds},
        tasks=draw(st.dictionaries(st.tuples(st.sampled_from(kinds), st.integers(0, 3)), times)),
        link=draw(links),
        links=draw(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), links)),
        atomic=draw(st.booleans()),
    )


@given(tasks=any_lists(), costs=any_costs(), blocking=st.booleans(), steps=st.integers(1, 3))
def test_events_and_gaps_fill_the_time_of_each_group(tasks, costs, blocking, steps):
    costs = dataclasses.replace(costs, blocking=blocking)
    simulated = simulate(tasks, costs, steps)
    for mpmd_idx, cells in enumerate(tasks):
        events = [event for event in simulated.events if event.mpmd_idx == mpmd_idx]
        gaps = [gap for gap in simulated.gaps if gap.mpmd_idx == mpmd_idx]
        row = cells if costs.atomic else [task for cell in cells for task in cell.tasks]
        assert [event.label for event in events] == [str(cell) for cell in row] * steps
        assert sum(event.duration for event in events) == simulated.busy[mpmd_idx]
        borders = [(span.start, span.end) for span in sorted([*events, *gaps], key=lambda span: span.start)]
        assert [start for start, _ in borders] == [0.0, *(end for _, end in borders[:-1])]
        assert borders[-1][1] == simulated.makespan
        assert all(start < end for start, end in borders)
    assert simulated.period <= simulated.makespan


@given(tasks=any_lists(), costs=any_costs(), latency=latencies)
def test_a_task_starts_as_soon_as_it_can(tasks, costs, latency):
    costs = dataclasses.replace(costs, link=Link(latency), links={}, atomic=False)
    num_stages = 1 + max(task.stage for cells in tasks for cell in cells for task in cell.tasks)
    tasks_and_events = [(event.activity.tasks[0], event) for event in simulate(tasks, costs).events]
    made = {makes(task): event for task, event in tasks_and_events}
    ends = collections.defaultdict(float)
    for task, event in tasks_and_events:
        inputs = [made[value] for value in needs(task, SliceNumbers(num_stages))]
        arrivals = [i.end if i.mpmd_idx == event.mpmd_idx else i.end + latency for i in inputs]
        assert event.start == max([ends[event.mpmd_idx], *arrivals])
        assert event.duration == costs.tasks.get((task.kind, task.stage), costs.kinds[task.kind])
        ends[event.mpmd_idx] = event.end


@given(tasks=any_lists(), costs=any_costs(), steps=st.integers(1, 2))
def test_measured_times_give_the_makespan_that_they_were_measured_in(tasks, costs, steps):
    simulated = simulate(tasks, costs, steps)
    waits = [Event(0, Wait(1), 0.0, 9.0)]
    measured = Costs.measured([*simulated.events, *waits])
    again = dataclasses.replace(measured, link=costs.link, links=costs.links, atomic=costs.atomic)
    assert simulate(tasks, again, steps).makespan == pytest.approx(simulated.makespan)


def test_why_groups_are_idle():
    tasks = Std1F1B(2).tasks(2)
    assert simulate(tasks, Costs(link=LATENCY)).gaps == (
        Gap(0, 2, 4.25, "waits for bwd_1__0 of group 1"),
        Gap(0, 4.25, 4.5, "waits for the transfer of bwd_1__0 from group 1"),
        Gap(0, 6.5, 7.25, "waits for bwd_1__1 of group 1"),
        Gap(0, 7.25, 7.5, "waits for the transfer of bwd_1__1 from group 1"),
        Gap(1, 0, 1, "waits for its first input, fwd_0__0 of group 0"),
        Gap(1, 1, 1.25, "waits for its first input, the transfer of fwd_0__0 from group 0"),
        Gap(1, 7.25, 9.5, "nothing left to do"),
    )
    blocking = simulate(tasks, Costs(link=LATENCY, blocking=True))
    assert [gap for gap in blocking.gaps if "sends" in gap.reason] == [
        Gap(0, 1, 1.25, "sends fwd_0__0 to group 1"),
        Gap(0, 2.25, 2.5, "sends fwd_0__1 to group 1"),
        Gap(1, 4.25, 4.5, "sends bwd_1__0 to group 0"),
        Gap(1, 7.5, 7.75, "sends bwd_1__1 to group 0"),
    ]


def test_messages_of_an_edge_leave_one_after_another():
    forwards = [
        [Task("fwd", 0, microbatch) for microbatch in range(3)],
        [Task("fwd", 1, microbatch) for microbatch in range(3)],
    ]
    costs = Costs(link=Link(latency=0.5, bandwidth=10), message_bytes=20)
    starts = [event.start for event in simulate(forwards, costs).events]
    assert starts == [0, 1, 2, 3.5, 5.5, 7.5]
    assert simulate(forwards, dataclasses.replace(costs, links={(0, 1): Link()})).makespan == 4
    assert simulate(forwards, dataclasses.replace(costs, links={(1, 0): Link()})).makespan == 8.5
    assert simulate([[*forwards[0], *forwards[1]]], costs).makespan == 6


def test_memory_rises_with_a_forward_and_falls_with_its_backward():
    simulated = simulate(Std1F1B(2).tasks(2))
    assert simulated.memory == (
        ((0, 0), (0, 1), (1, 2), (6, 1), (9, 0)),
        ((0, 0), (1, 1), (4, 0), (4, 1), (7, 0)),
    )
    assert simulated.peaks == (2, 1)
    split = from_text("fwd_0__0 bwdA_0__0 fwd_0__1 bwdA_0__1 bwdW_0__0 bwdW_0__1")
    ((*steps,),) = simulate(split, Costs(held_for_bwdw=0.25)).memory
    assert steps == [(0, 0), (0, 1), (2, 0.25), (2, 1.25), (4, 0.5), (5, 0.25), (6, 0)]
    assert simulate(from_text("fwd_0__0 fwd_0__1\nfwd_1__0 fwd_1__1")).peaks == (0, 0)
    fused = from_text("FusedTask(fwd_0__0, fwd_0__1) FusedTask(bwd_0__0, bwd_0__1)")
    assert simulate(fused, Costs(atomic=True)).memory == (((0, 0), (0, 2), (6, 1), (6, 0)),)


def test_a_fused_cell_runs_its_members_one_after_another_or_as_one():
    tasks = from_text("fwd_0__0 bwd_0__0\nFusedTask(fwd_1__0, bwd_1__0)")
    apart = [(event.label, event.start, event.end) for event in simulate(tasks).events[2:]]
    assert apart == [("fwd_1__0", 1, 2), ("bwd_1__0", 2, 4)]
    costs = Costs(fused={(("fwd", 1), ("bwd", 1)): 2.4})
    (as_one,) = simulate(tasks, dataclasses.replace(costs, atomic=True)).events[2:]
    assert (as_one.label, as_one.duration) == ("FusedTask(fwd_1__0, bwd_1__0)", pytest.approx(2.4))
    shared = [event.duration for event in simulate(tasks, costs).events[2:]]
    assert shared == pytest.approx([0.8, 1.6])


def test_an_atomic_cell_sends_all_it_makes_for_a_group_as_one_message():
    tasks = from_text("FusedTask(fwd_0__0, fwd_0__1)\nfwd_1__0 fwd_1__1")
    costs = Costs(link=Link(latency=1, bandwidth=1), message_bytes=3)
    starts = [event.start for event in simulate(tasks, costs).events if event.mpmd_idx == 1]
    assert starts == [1 + 3 + 1, 1 + 3 + 3 + 1]
    atomic = simulate(tasks, dataclasses.replace(costs, atomic=True))
    assert [event.start for event in atomic.events] == [0, 2 + 6 + 1, 2 + 6 + 1 + 1]


def test_measured_times_are_medians_and_shares():
    events = [
        Event(0, parse_task("fwd_0__0"), 0.0, 1.0),
        Event(0, parse_task("fwd_0__1"), 1.0, 3.0),
        Event(0, parse_task("fwd_0__2"), 3.0, 12.0),
        Event(0, parse_task("fwd_1__0"), 3.0, 7.0),
        Event(1, parse_task("FusedTask(fwd_2__0, bwd_2__0)"), 0.0, 6.0),
        Event(1, Wait(0), 6.0, 8.0),
        Event(1, parse_task("after_0"), 8.0, 8.5),
        Event(0, parse_task("after_0"), 8.0, 8.25),
    ]
    costs = Costs.measured(events)
    assert costs.tasks == {("fwd", 0): 2.0, ("fwd", 1): 4.0, ("fwd", 2): 2.0, ("bwd", 2): 4.0}
    assert costs.kinds == {"fwd": 2.0, "bwd": 4.0}
    assert costs.fused == {(("fwd", 2), ("bwd", 2)): 6.0}
    after = OutsideTask("after", 0)
    assert costs.outside == {(0, after): 0.25, (1, after): 0.5}
    assert simulate(GPipe(2).tasks(1), costs).makespan == 2 + 4 + 4 + 4
    with pytest.raises(ValueError, match="no time is known of bwdA_0, bwdW_0"):
        simulate(from_text("fwd_0__0 bwdA_0__0 bwdW_0__0"), costs)


def test_nothing_to_do_takes_no_time():
    for nothing in ([], [[], []]):
        simulated = simulate(nothing)
        assert (simulated.makespan, simulated.bubble, simulated.bubble_over_ideal) == (0, 0, 0)
        assert (simulated.events, simulated.gaps, simulated.peaks) == ((), (), (0,) * len(nothing))


STUCK = {
    "too early": ("bwd_0__0 fwd_0__0", "group 0 runs bwd_0__0 before fwd_0__0"),
    "in a circle": (
        "fwd_0__0 bwd_0__0 fwd_0__1 bwd_0__1\nfwd_1__0 fwd_1__1 bwd_1__0 bwd_1__1",
        "group 0 waits at bwd_0__0 for bwd_1__0",
    ),
}


@pytest.mark.parametrize("name", STUCK)
@pytest.mark.parametrize("atomic", [False, True])
def test_lists_that_get_stuck_are_an_error_that_says_where(name, atomic):
    text, said = STUCK[name]
    with pytest.raises(ValueError, match=said):
        simulate(from_text(text), Costs(atomic=atomic))


def test_an_atomic_cell_can_get_stuck_where_its_members_cannot():
    tasks = from_text("FusedTask(fwd_0__0, bwd_0__0)\nfwd_1__0 bwd_1__0")
    assert simulate(tasks).makespan == 6
    with pytest.raises(ValueError, match="group 1 waits at fwd_1__0 for fwd_0__0"):
        simulate(tasks, Costs(atomic=True))


def test_what_cannot_be_is_an_error():
    with pytest.raises(TypeError, match="group 1 has None: neither a Task nor a FusedTask"):
        simulate([[Task("fwd", 0, 0)], [None, Task("fwd", 1, 0)]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, not 0"):
        simulate(GPipe(2).tasks(1), steps=0)
    with pytest.raises(ValueError, match="bandwidth must be a number above 0"):
        Link(bandwidth=0)
    with pytest.raises(ValueError, match=r"'fwd'. must be .* not -1\n.*'bwd', 2.* not -0.5"):
        Costs(kinds={"fwd": -1}, tasks={("bwd", 2): -0.5})
