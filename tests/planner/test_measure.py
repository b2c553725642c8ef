"""Tasks that are measured, for a step that is only planned."""

import itertools

import jax
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.ir.events import Event
from mpmd.ir.plan import Executable, GroupProgram, OutsideTask, Plan, Run, parse_cell
from mpmd.planner.trials import measure, rehearsal
from mpmd.planner.trials.measure import costs_of, measure_tasks, repeat, typical_seconds, warm_up
from mpmd.planner.trials.rehearsal import some_values
from tests.support.small_plans import lowered


def test_each_task_gets_a_time_and_each_executable_its_memory():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}, {"data": 2}], in_specs=(None, P(None, "data")))
    assert any(None in executable.out_specs for executable in step.plan.executables)
    found = measure_tasks(step, seconds=0.0)
    costs = costs_of(found.plan, found.seconds)
    assert set(costs.tasks) == {(kind, stage) for kind in ("fwd", "bwd") for stage in (0, 1)}
    assert min(found.seconds.values()) > 0
    assert all(executable.memory is not None for executable in found.plan.executables)
    assert all(None not in (*e.in_specs, *e.out_specs) for e in found.plan.executables)
    assert step.simulate(costs).makespan >= sum(costs.tasks.values())


def test_groups_are_timed_one_by_one_and_equal_groups_once(monkeypatch):
    rehearsed = []

    class Recorded(measure.Rehearsal):
        def __init__(self, program, mpmd_idx, submesh, executables):
            rehearsed.append((mpmd_idx, [device.id for device in submesh.devices.flat]))
            super().__init__(program, mpmd_idx, submesh, executables)

    monkeypatch.setattr(measure, "Rehearsal", Recorded)
    submeshes = [{"data": 1}] * 3 + [{"data": 2}]
    step = lowered(mpmd.Std1F1B(4), submeshes, in_specs=(None, P(None, "data")))
    seconds = measure_tasks(step, jax.devices()[:2], seconds=0.0).seconds
    middle = [{e.name for e in step.plan.executables_of(group)} for group in (1, 2)]
    assert middle[0] == middle[1]
    assert rehearsed == [(0, [0]), (1, [0]), (3, [0, 1])]
    assert all(seconds[1, name] == seconds[2, name] for name in middle[1])
    assert {group for group, _ in seconds} == {0, 1, 2, 3}


def test_groups_may_have_more_devices_than_there_are():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}, {"data": 4}])
    with pytest.raises(ValueError, match="group 1 has 4 devices, and there are 2"):
        measure_tasks(step, jax.devices()[:2])


def test_tasks_that_call_python_are_not_run():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2, calls_python=True)
    with pytest.raises(ValueError, match="would call these functions of Python"):
        measure_tasks(step)


def test_a_step_donates_what_the_one_before_has_returned(monkeypatch):
    made = []

    def noted(aval):
        made.append(aval)
        return some_values(aval)

    monkeypatch.setattr(rehearsal, "some_values", noted)
    measure_tasks(lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2), seconds=0.0)
    assert len(made) < 10, "a few arrays for each group, and no more for each of its steps"


def test_steps_of_other_precision_are_timed():
    with jax.enable_x64(True):
        step = lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2)
        assert min(measure_tasks(step, seconds=0.0).seconds.values()) > 0


def spans(*durations, start=0.0):
    """Tasks of an executable, one behind the other."""
    task, events = parse_cell("fwd_0__0"), []
    for duration in durations:
        events.append(("fwd", Event(0, task, start, start + duration)))
        start += duration
    return events


def test_a_disturbed_step_does_not_count():
    steps = [spans(1.0, 3.0), spans(20.0, 30.0), spans(2.0, 4.0)]
    assert typical_seconds(steps) == {"fwd": 3.0}


def test_calls_are_made_often_enough():
    numbers = itertools.count()
    assert repeat(lambda: next(numbers), 0.0) == [*range(5)]


@pytest.mark.parametrize(
    ("seconds", "calls"), [([9.0, 6.0, 5.0, 4.9], 4), ([5.0, 7.0], 2), ([0.5**n for n in range(9)], 6)]
)
def test_a_call_is_warm_when_it_is_no_longer_quicker(seconds, calls):
    left = iter(seconds)
    warm_up(lambda: next(left))
    assert [*left] == seconds[calls:]


def plan_of(*groups):
    """A plan of groups' tasks, each with the executable that it runs."""
    programs = tuple(
        GroupProgram(group, tuple(Run(task, executable, (), ()) for task, executable in tasks))
        for group, tasks in enumerate(groups)
    )
    names = {executable for tasks in groups for _, executable in tasks}
    executables = tuple(Executable(name, (), (), (), (), ()) for name in sorted(names))
    return Plan(programs, executables, (), (), ())


def test_a_task_takes_the_mean_of_its_executables():
    first, second = parse_cell("bwd_0__0"), parse_cell("bwd_0__1")
    after = OutsideTask("after", 0)
    plan = plan_of([(first, "first"), (second, "next"), (after, "after")], [(after, "after")])
    seconds = {(0, "first"): 1.0, (0, "next"): 2.0, (0, "after"): 5.0, (1, "after"): 7.0}
    costs = costs_of(plan, seconds)
    assert costs.tasks == {("bwd", 0): 1.5}
    assert costs.kinds == {"bwd": 1.5}
    assert costs.outside == {(0, after): 5.0, (1, after): 7.0}


def test_a_fused_cell_keeps_its_time():
    cell = parse_cell("FusedTask(fwd_0__0, bwd_0__0)")
    costs = costs_of(plan_of([(cell, "both")]), {(0, "both"): 3.0})
    assert costs.fused == {(("fwd", 0), ("bwd", 0)): 3.0}
    assert sum(costs.tasks.values()) == 3.0
