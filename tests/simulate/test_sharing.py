"""Groups that share cores: each is the slower the more of them are at work."""

import dataclasses

import pytest

from mpmd.schedules import FAMILIES, GPipe
from mpmd.schedules.text import from_text
from mpmd.simulate import Costs, Link, simulate
from tests.support.placements import PLACEMENTS

SCHEDULES = [FAMILIES[name].build(4) for name in ("GPipe", *PLACEMENTS)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_with_a_core_for_each_group_nothing_changes_and_one_core_does_all_work_in_turn(schedule):
    tasks = schedule.tasks(8)
    costs = Costs(link=Link(latency=0.25, bandwidth=0.5), message_bytes=3)  # messages wait for one another
    own = simulate(tasks, costs, steps=2)
    shared = simulate(tasks, dataclasses.replace(costs, at_once=4), steps=2)
    assert shared.makespan == pytest.approx(own.makespan)
    assert shared.period == pytest.approx(own.period)
    assert shared.busy == pytest.approx(own.busy)
    assert [(e.label, pytest.approx(e.start), pytest.approx(e.end)) for e in own.events] == [
        (e.label, e.start, e.end) for e in shared.events
    ]
    assert shared.peaks == pytest.approx(own.peaks)
    assert simulate(tasks, Costs(at_once=1)).makespan == pytest.approx(sum(own.busy) / 2)  # of two steps


def test_speeds_change_when_a_group_begins_and_ends():
    # Group 0 computes alone for 4, then both share one core and a half.
    tasks = from_text("fwd_0__0 fwd_0__1\nfwd_1__0 fwd_1__1")
    costs = Costs(tasks={("fwd", 0): 4.0, ("fwd", 1): 2.0}, at_once=1.5)
    found = {event.label: (event.start, event.end) for event in simulate(tasks, costs).events}
    # fwd_1__0 has 2 to do at 3/4: it ends at 4 + 8/3, when fwd_0__1 has done 2 of 4, and goes on alone.
    second = 4 + 8 / 3
    assert found["fwd_0__0"] == pytest.approx((0, 4))
    assert found["fwd_1__0"] == pytest.approx((4, second))
    assert found["fwd_0__1"] == pytest.approx((4, second + 2))
    assert found["fwd_1__1"] == pytest.approx((second + 2, second + 4))


def test_a_group_counts_by_its_load():
    # Group 0 could use three cores of two: it goes on at 2/3 alone, and beside group 1 both do at 1/2.
    tasks = from_text("fwd_0__0 fwd_0__1\nfwd_1__0 fwd_1__1")
    costs = Costs(tasks={("fwd", 0): 4.0, ("fwd", 1): 2.0}, at_once=2.0, loads=(3.0, 1.0))
    spans = {event.label: (event.start, event.end) for event in simulate(tasks, costs).events}
    assert spans["fwd_0__0"] == pytest.approx((0, 6))
    assert spans["fwd_1__0"] == pytest.approx((6, 10))
    # fwd_0__1 has done 2 of 4, and goes on alone.
    assert spans["fwd_0__1"] == pytest.approx((6, 13))
    assert spans["fwd_1__1"] == pytest.approx((13, 15))


def test_groups_that_wait_for_one_another_are_named():
    tasks = from_text("bwd_0__0 fwd_0__0\nfwd_1__0 bwd_1__0")
    with pytest.raises(ValueError, match="deadlock"):
        simulate(tasks, Costs(at_once=1))


@pytest.mark.parametrize("wrong", [{"at_once": 0.0}, {"at_once": 2.0, "blocking": True}])
def test_what_cannot_be(wrong):
    with pytest.raises(ValueError, match="at_once"):
        Costs(**wrong)


@pytest.mark.parametrize(
    "loads, error", [((1.0, 0.0), ValueError), ((1.0, float("inf")), ValueError), ([1.0], TypeError)]
)
def test_loads_that_cannot_be(loads, error):
    with pytest.raises(error, match="loads"):
        Costs(at_once=1.0, loads=loads)


def test_loads_are_those_of_all_groups():
    with pytest.raises(ValueError, match="3 loads, and there are 2 groups"):
        simulate(GPipe(2).tasks(4), Costs(at_once=1.0, loads=(1.0, 2.0, 1.0)))
