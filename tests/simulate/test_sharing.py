"""Groups that share cores: each is the slower the more of them are at work."""

import dataclasses

import pytest

from mpmd.schedules import FAMILIES
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


def test_groups_that_wait_for_one_another_are_named():
    tasks = from_text("bwd_0__0 fwd_0__0\nfwd_1__0 bwd_1__0")
    with pytest.raises(ValueError, match="deadlock"):
        simulate(tasks, Costs(at_once=1))


@pytest.mark.parametrize("wrong", [{"at_once": 0.0}, {"at_once": 2.0, "blocking": True}])
def test_what_cannot_be(wrong):
    with pytest.raises(ValueError, match="at_once"):
        Costs(**wrong)
