"""List schedules, which are found for given times and memory; and families, which are found by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.schedules import (
    FAMILIES,
    GPipe,
    Interleaved1F1B,
    InterleavedZeroBubble,
    ListSchedule,
    RoundRobin,
    Std1F1B,
    TaskTimes,
    VHalf,
    VMin,
    VShaped,
    ZeroBubble,
    ZeroBubbleV,
    build,
    check_schedule,
    v_shape,
)
from mpmd.simulate import simulate
from tests.support.lists import costs_of, figures, flat

groups = st.integers(1, 5)
microbatches = st.integers(1, 12)
lengths = st.sampled_from([0.25, 0.5, 1, 1.75, 3])


@st.composite
def task_times(draw: st.DrawFn, num_stages: int) -> TaskTimes:
    per_stage = st.lists(lengths, min_size=num_stages, max_size=num_stages)
    kinds = {kind: draw(lengths | per_stage) for kind in ("fwd", "bwd", "bwdA", "bwdW")}
    return TaskTimes(**kinds, hop=draw(st.sampled_from([0, 0.5])))


def makespan(lists, times):
    return simulate(lists, costs_of(times, lists)).makespan


def peaks(lists):
    return [int(peak) for peak in figures(lists)[1]]


@given(st.data())
def test_any_placement_times_and_memory_give_a_schedule_that_keeps_to_them(data):
    p = data.draw(groups)
    rest = data.draw(st.lists(st.integers(0, p - 1), max_size=p))
    placement = data.draw(st.permutations([*range(p), *rest]))
    limits = [placement.count(i) + data.draw(st.integers(0, 3)) for i in range(p)]
    schedule = ListSchedule(
        len(placement),
        p,
        placement=placement,
        times=data.draw(task_times(len(placement))),
        memory_limit=data.draw(st.sampled_from([None, max(limits), limits])),
        split_backward=data.draw(st.booleans()),
    )
    m = data.draw(microbatches)
    lists = schedule.tasks(m)
    check_schedule(lists, len(placement), m, p)
    assert all(placement[task.stage] == i for i, cells in enumerate(lists) for task in flat(cells))
    if schedule.memory_limit is not None:
        most = limits if isinstance(schedule.memory_limit, tuple) else [max(limits)] * p
        assert all(peak <= limit for peak, limit in zip(peaks(lists), most, strict=True))


@given(st.data(), groups, st.integers(1, 3), microbatches)
def test_nothing_made_by_hand_is_shorter_with_the_same_memory(data, p, v, m):
    handmade = data.draw(
        st.sampled_from(
            [Std1F1B(p), ZeroBubble(p), Interleaved1F1B(v * p, p), InterleavedZeroBubble(v * p, p)]
        )
        | st.sampled_from([ZeroBubbleV(2 * p, p), VHalf(2 * p, p), VMin(2 * p, p)])
    )
    times = data.draw(task_times(handmade.num_stages))
    lists = handmade.tasks(m)
    found = ListSchedule(
        handmade.num_stages,
        p,
        placement=v_shape(p) if isinstance(handmade, VShaped) else (),
        times=times,
        memory_limit=peaks(lists),
        split_backward=all(task.kind != "bwd" for task in flat(lists[0])),
    )
    assert makespan(found.tasks(m), times) <= makespan(lists, times)


@given(p=groups, m=microbatches)
def test_with_equal_times_it_is_as_short_as_can_be(p, m):
    assert simulate(ListSchedule(p, p, split_backward=False).tasks(m)).makespan == 3 * (m + p - 1)
    assert simulate(ListSchedule(p, p, memory_limit=p).tasks(m)).makespan == 2 * m + p - 1 + max(m, p)


def test_stages_that_differ_are_kept_busier_than_by_an_order_for_equal_ones():
    times = TaskTimes(fwd=[3, 1, 1, 3], bwdA=[3, 1, 1, 3], bwdW=1)
    handmade = InterleavedZeroBubble(4, 2).tasks(8)
    found = ListSchedule(4, 2, times=times, memory_limit=peaks(handmade)).tasks(8)
    assert (makespan(handmade, times), makespan(found, times)) == (98, 88)


def test_a_limit_of_one_microbatch_runs_one_after_another():
    lists = ListSchedule(3, 3, memory_limit=1).tasks(4)
    assert figures(lists) == (4 * (3 + 3 + 1), [1, 1, 1])


def test_what_cannot_be_found_is_an_error_that_says_all_that_is_wrong():
    with pytest.raises(ValueError) as caught:
        ListSchedule(4, 2, times=TaskTimes(fwd=[1, 2], bwdW=[1] * 5), memory_limit=1)
    assert str(caught.value) == (
        "ListSchedule cannot be made: times.fwd has 2 numbers for 4 stages; times.bwdW has 5 numbers for "
        "4 stages; memory_limit of group 0 is 1, and it has 2 stages; memory_limit of group 1 is 1, and it "
        "has 2 stages"
    )
    with pytest.raises(ValueError, match="memory_limit has 3 numbers for 2 groups"):
        ListSchedule(2, 2, memory_limit=[1, 2, 3])
    with pytest.raises(ValueError, match=r"fwd\[1\] must be a time of at least 0, not -1"):
        TaskTimes(fwd=[1, -1])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_builds_its_schedule_from_either_size(name):
    family = FAMILIES[name]
    v = 2 if issubclass(family.schedule, RoundRobin | VShaped) else 1
    schedule = build(name.lower(), mpmd_dim=3)
    assert (schedule.name, schedule.mpmd_dim, schedule.num_stages) == (name, 3, 3 * v)
    assert build(name.upper(), num_stages=3 * v) == family.build(3, 3 * v) == schedule


def test_what_cannot_be_built_is_an_error_that_says_what_can():
    with pytest.raises(ValueError, match="there is no schedule '1f1b'; there are GPipe, Std1F1B, "):
        build("1f1b", 4)
    with pytest.raises(ValueError, match="GPipe needs a size: mpmd_dim, num_stages or both"):
        build("GPipe")
    with pytest.raises(ValueError, match="mpmd_dim=2 takes num_stages=2, got num_stages=4"):
        build("GPipe", 2, 4)
    with pytest.raises(ValueError, match="mpmd_dim=4 takes num_stages=8, got num_stages=7"):
        build("VHalf", num_stages=7)
    assert FAMILIES["GPipe"].schedule is GPipe
