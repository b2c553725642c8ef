"""Tasks on devices that share the cores of their node."""

import dataclasses
import math

import pytest

import mpmd
from mpmd.planner.candidate import Candidate
from mpmd.planner.shared_cores import groups_at_once, time_alone, time_alone_of, time_together
from mpmd.planner.trials import realize
from mpmd.planner.trials.measure import MeasuredTasks
from mpmd.simulate import Link
from tests.support.small_plans import MICROBATCHES, lowered

SHARED = mpmd.Cluster(1, 4, 1e9, 1e9, 1e9, Link(), Link(), task_overhead=1.0, alone=2.0)
"""Four devices on the cores of two."""


def test_devices_that_share_half_of_the_cores():
    assert time_alone(SHARED) == 0.5 and groups_at_once(SHARED, 1) == 2 and groups_at_once(SHARED, 2) == 1
    assert [time_together(SHARED, groups, 1) for groups in (1, 2, 3, 4)] == [0.5, 0.5, 0.75, 1.0]
    assert [time_alone_of(SHARED, groups, 1) for groups in (1, 2, 4)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("change", [{"alone": 1.0}, {"nodes": 2}])
def test_devices_that_share_nothing(change):
    own = dataclasses.replace(SHARED, **change)
    assert time_alone(own) == time_together(own, 4, 1) == time_alone_of(own, 4, 1) == 1.0
    assert math.isinf(groups_at_once(own, 1))


@pytest.mark.parametrize("together, alone", [(1, 3.0), (2, 3.0), (4, 1.5)])
def test_what_is_measured_beside_others_is_shorter_alone(monkeypatch, together, alone):
    schedule = mpmd.Std1F1B(4)
    step = lowered(schedule, [{"data": 1}] * 4)
    candidate = Candidate((1,) * 4, ({"data": 1},) * 4, schedule, MICROBATCHES, remat=False, fsdp=False)
    seconds = {(group, e.name): 2.0 for group in range(4) for e in step.plan.executables_of(group)}
    measured = MeasuredTasks(step.plan, seconds, (together,) * 4)
    given = []
    monkeypatch.setattr(realize, "measure_tasks", lambda step, devices: given.append(devices) or measured)
    costs = realize.measured(
        realize.simulated(step, candidate, SHARED), candidate, SHARED, devices=list(range(8))
    ).costs
    assert given == [[0, 1, 2, 3]], "those of one node"
    assert costs.at_once == 2 and {*costs.tasks.values()} == {alone}
