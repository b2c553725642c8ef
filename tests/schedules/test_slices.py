"""Schedules of slices: every size can run, and bubbles and memory are those of the closed forms."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.ir.plan import Task
from mpmd.render import schedule_grid
from mpmd.schedules import (
    ALL_FAMILIES,
    CustomSchedule,
    GPipe,
    ListSchedule,
    ScheduleError,
    Seq1F1B,
    Std1F1B,
    ZeroBubble,
    build,
    check_schedule,
    from_text,
    to_text,
)
from mpmd.simulate import Costs, simulate

sizes = st.integers(1, 5)

SIZES = [(4, 4, 4), (4, 8, 2), (2, 3, 4), (4, 2, 8)]
"""Groups, microbatches and slices."""


@st.composite
def schedules(draw: st.DrawFn):
    """A schedule of slices of any class and size."""
    p, v, s = draw(sizes), draw(st.integers(1, 3)), draw(sizes)
    split = draw(st.booleans())
    match draw(st.sampled_from(["seq", "gpipe", "list"])):
        case "seq":
            return Seq1F1B(p * v, s, p, eager=draw(st.booleans()), split_backward=split)
        case "gpipe":
            return GPipe(p, s)
    limit = draw(st.none() | st.integers(v * s, v * s + 3))
    return ListSchedule(p * v, p, memory_limit=limit, split_backward=split, slices=s)


def figures(schedule, m):
    """The share of idle time, and the most residuals of microbatches of all of a group's stages."""
    parts = schedule.num_stages // schedule.mpmd_dim * schedule.slices
    costs = Costs({"fwd": 1 / parts, "bwd": 2 / parts, "bwdA": 1 / parts, "bwdW": 1 / parts})
    simulated = simulate(schedule.tasks(m), costs, slices=schedule.slices)
    return simulated.bubble, [peak / parts for peak in simulated.peaks]


@given(schedule=schedules(), m=sizes, form=st.sampled_from(["tasks", "csv"]))
def test_every_schedule_of_every_size_can_run_takes_slices_in_one_order_and_parses_back(schedule, m, form):
    numbers, lists = schedule.numbers, schedule.tasks(m)
    check_schedule(lists, schedule.num_stages, m, schedule.mpmd_dim, schedule.slices)
    read = CustomSchedule.from_text(to_text(lists, form, schedule.slices))
    assert (read.tasks(m), read.slices) == (lists, schedule.slices)
    for cells in lists:
        tasks = [task for cell in cells for task in cell.tasks]
        for kind, stage in {(task.kind, numbers.stage_of(task.stage)) for task in tasks}:
            taken = [
                (task.microbatch, numbers.slice_of(task.stage) * (1 if kind == "fwd" else -1))
                for task in tasks
                if (task.kind, numbers.stage_of(task.stage)) == (kind, stage)
            ]
            assert taken == sorted(taken) and len(taken) == m * schedule.slices


@pytest.mark.parametrize(("p", "m", "s"), SIZES)
def test_the_bubble_is_that_of_the_closed_form(p, m, s):
    for v, split in itertools.product((1, 2), (False, True)):
        bubble, _ = figures(Seq1F1B(p * v, s, p, split_backward=split), m)
        assert bubble == pytest.approx((p - 1) / ((3 if split else 1) * v * m * s + p - 1)), (v, split)
    assert figures(GPipe(p, s), m)[0] == pytest.approx((p - 1) / (m * s + p - 1))


@pytest.mark.parametrize(("p", "m", "s"), SIZES)
def test_the_memory_is_that_of_the_closed_forms(p, m, s):
    _, whole = figures(Seq1F1B(p, s), m)
    assert whole == pytest.approx([min(m, (s + p - 1 - i) / s) for i in range(p)])
    _, split = figures(Seq1F1B(p, s, split_backward=True), m)
    assert split == pytest.approx([min(m, (s + p - 1) / s)] * p)
    _, eager = figures(Seq1F1B(p, s, eager=True), m)
    assert eager == pytest.approx([min(m, (s + 2 * (p - 1 - i)) / s) for i in range(p)])
    _, all_forwards_first = figures(GPipe(p, s), m)
    assert all_forwards_first == pytest.approx([m] * p)
    for v in (2, 4) if s % p == 0 else ():
        _, several = figures(Seq1F1B(p * v, s, p), m)
        assert max(several) == pytest.approx(min(m, 1 + 2 * (p - 1) / (v * s)))


@given(p=sizes, m=st.integers(1, 12))
def test_one_slice_is_the_schedule_without_slices(p, m):
    assert Seq1F1B(p, 1).tasks(m) == Std1F1B(p).tasks(m)
    assert Seq1F1B(p, 1, split_backward=True).tasks(m) == ZeroBubble(p).tasks(m)


GRID = """
0  F0s0 F0s1 .    .        B0s1---- B0s0----
1  .    F0s0 F0s1 B0s1---- B0s0---- .
"""


def test_a_grid_names_slices():
    drawn = schedule_grid(Seq1F1B(2, 2).tasks(1), slices=2)
    assert drawn.split()[1:3] == ["F0s0", "F0s1"]
    assert from_text(drawn) == Seq1F1B(2, 2).tasks(1)
    assert CustomSchedule.from_text(GRID).tasks(1) == Seq1F1B(2, 2).tasks(1)


def test_the_text_of_a_schedule_has_slices_where_there_are_some():
    assert repr(GPipe(2)) == "GPipe(num_stages=2)"
    assert repr(GPipe(2, slices=3)) == "GPipe(num_stages=2, slices=3)"
    assert repr(CustomSchedule.from_text(GRID)).endswith("num_microbatches=1, slices=2)")
    assert repr(Seq1F1B(4, 2, 2)) == (
        "Seq1F1B(num_stages=4, mpmd_dim=2, slices=2, eager=False, split_backward=False)"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F0s0 B0", "line 1, column 6: 'B0' and others do not agree; name the slice of all or none"),
        ("F0s0+B0", "names the slice of some of its tasks"),
        ("F0s", "'F0s' is not a task"),
    ],
)
def test_what_names_no_slice_is_refused(text, said):
    with pytest.raises(ValueError) as caught:
        from_text(text)
    assert said in str(caught.value)


def test_backwards_in_ascending_order_are_refused():
    with pytest.raises(ScheduleError) as caught:
        CustomSchedule.from_text("F0s0 F0s1 B0s0 B0s1\nF0s0 F0s1 B0s1 B0s0")
    assert "(2 stages, 2 slices, 1 microbatch)" in str(caught.value)
    assert "group 0 runs bwd_0__0s0 before bwd_0__0s1, which it needs" in str(caught.value)
    assert "B0s0[1]" in str(caught.value)


def test_a_stage_is_on_one_group_for_all_slices():
    with pytest.raises(ScheduleError, match=r"stage 0 is on more than one group: fwd_0__0s0 \(group 0\)"):
        check_schedule([[Task("fwd", 0, 0)], [Task("fwd", 1, 0)]], 1, 1, slices=2)


def test_missing_slices_are_named():
    with pytest.raises(ScheduleError, match="missing: bwd_0__0s1"):
        check_schedule([[Task("fwd", 0, 0), Task("fwd", 1, 0), Task("bwd", 0, 0)]], 1, 1, slices=2)


def test_slices_are_counted():
    with pytest.raises(ValueError, match=r"mpmd_dim=4 takes num_stages=4, 8, 12, .*, got num_stages=6"):
        Seq1F1B(6, 2, 4)
    with pytest.raises(ValueError, match="memory_limit of group 0 is 3, and it has 1 stages on 4 slices"):
        ListSchedule(2, 2, memory_limit=3, slices=4)
    with pytest.raises(ValueError, match="3 slices pass the same stages"):
        CustomSchedule([[Task("fwd", 0, 0), Task("bwd", 0, 0), Task("fwd", 1, 0)]], slices=3)


def test_families_are_built_with_slices():
    assert build("seq1f1b", 4, slices=2) == Seq1F1B(4, 2)
    assert build("GPipe", 4, slices=2) == GPipe(4, 2)
    assert build("ListSchedule", 2, slices=2).slices == 2
    assert {name for name, family in ALL_FAMILIES.items() if family.has_slices} == {
        "GPipe",
        "ListSchedule",
        "Seq1F1B",
    }
    with pytest.raises(ValueError, match=r"Std1F1B does not cut microbatches into slices; GPipe, .* do"):
        build("Std1F1B", 4, slices=2)
