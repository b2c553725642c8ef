"""Tasks that are measured, for a step that is only planned."""

import functools
import time

import jax
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.ir.events import Event
from mpmd.ir.plan import Executable, GroupProgram, OutsideTask, Plan, Run, parse_cell
from mpmd.planner.trials import measure
from mpmd.planner.trials import rehearsal as rehearse
from mpmd.planner.trials.measure import costs_of, devices_at_once_of_tasks, measure_tasks, typical_seconds
from mpmd.planner.trials.rehearsal import Rehearsal
from mpmd.planner.trials.timing import LEAST_CALLS, MOST_WARM_UPS, repeat_together, warm_up
from mpmd.runtime.compiling import compile_executable
from tests.support.small_plans import lowered


@functools.cache
def on_equal_groups(number):
    """A step on groups of a device each."""
    return lowered(mpmd.Std1F1B(number), [{"data": 1}] * number)


def test_each_task_gets_a_time_and_each_executable_its_memory():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}, {"data": 2}], in_specs=(None, P(None, "data")))
    assert any(None in executable.out_specs for executable in step.plan.executables)
    found = measure_tasks(step, seconds=0.0)
    costs = costs_of(found.plan, found.alone)
    assert set(costs.tasks) == {(kind, stage) for kind in ("fwd", "bwd") for stage in (0, 1)}
    assert min(found.alone.values()) > 0
    assert found.together.keys() == found.alone.keys()
    assert all(executable.memory is not None for executable in found.plan.executables)
    assert all(None not in (*e.in_specs, *e.out_specs) for e in found.plan.executables)
    assert step.simulate(costs).makespan >= sum(costs.tasks.values())


@pytest.fixture
def on_accelerators(monkeypatch):
    """This process's devices share nothing."""
    monkeypatch.setattr(measure, "share_host", lambda devices: False)


@pytest.fixture
def rehearsed(monkeypatch):
    """The groups that run their programs, with the devices of each."""
    found = []

    class Recorded(measure.Rehearsal):
        def __init__(self, program, mpmd_idx, submesh, executables):
            found.append((mpmd_idx, [device.id for device in submesh.devices.flat]))
            super().__init__(program, mpmd_idx, submesh, executables)

    monkeypatch.setattr(measure, "Rehearsal", Recorded)
    return found


def test_groups_that_share_their_host_are_at_work_together(rehearsed):
    step = lowered(mpmd.Std1F1B(3), [{"data": 1}, {"data": 2}, {"data": 1}], in_specs=(None, P(None, "data")))
    found = measure_tasks(step, jax.devices()[:3], seconds=0.0)
    assert rehearsed == [(0, [0]), (1, [1, 2]), (2, [0])]
    differ = {
        mpmd_idx for (mpmd_idx, name), time in found.together.items() if time != found.alone[mpmd_idx, name]
    }
    assert differ == {0, 1}
    assert found.at_work == (3, 3, 1)
    assert found.devices_at_once is None


def test_a_group_by_itself_takes_over_times_alone(rehearsed):
    submeshes = [{"data": 1}] * 3 + [{"data": 2}]
    step = lowered(mpmd.Std1F1B(4), submeshes, in_specs=(None, P(None, "data")))
    measured = measure_tasks(step, jax.devices()[:2], seconds=0.0)
    middle = [{e.name for e in step.plan.executables_of(group)} for group in (1, 2)]
    assert middle[0] == middle[1]
    assert rehearsed == [(0, [0]), (1, [1]), (3, [0, 1])]
    assert measured.at_work == (2, 2, 1, 2)
    for name in middle[1]:
        assert measured.alone[1, name] == measured.alone[2, name] == measured.together[2, name]


@pytest.fixture
def timed(monkeypatch):
    """Groups take one second for each task by themselves, and ``slower`` together."""

    def of(slower):
        def seconds_of(rehearsals, seconds):
            time = 1.0 if len(rehearsals) == 1 else slower
            return {
                (rehearsal.mpmd_idx, name): time for rehearsal in rehearsals for name, _ in rehearsal.step()
            }

        monkeypatch.setattr(measure, "_seconds_of", seconds_of)

    return of


@pytest.mark.parametrize("slower, at_once", [(1.0, 3.0), (1.5, 2.0), (3.0, 1.0)])
def test_tasks_show_how_many_devices_compute_at_once(timed, slower, at_once):
    timed(slower)
    tasks = measure_tasks(on_equal_groups(3), jax.devices()[:3])
    assert tasks.devices_at_once == pytest.approx(at_once)
    assert {*tasks.alone.values()} == {1.0} and {*tasks.together.values()} == {slower}


def test_some_groups_together_do_not_show_how_all_share_cores(timed):
    timed(1.0)
    step = on_equal_groups(3)
    assert measure_tasks(step, jax.devices()[:2]).devices_at_once is None
    assert measure_tasks(step, jax.devices()[:3]).devices_at_once == 3.0


def test_tasks_that_run_often_count_as_often():
    plan = plan_of([(parse_cell("fwd_0__0"), "often")] * 3 + [(parse_cell("bwd_0__0"), "once")], [])
    alone, together = {(0, "often"): 1.0, (0, "once"): 1.0}, {(0, "often"): 2.0, (0, "once"): 1.0}
    assert devices_at_once_of_tasks(plan, [1, 1], alone, together) == pytest.approx(2 * 4 / 7)


def test_the_smallest_groups_show_how_many_devices_compute_at_once():
    plan = plan_of([(parse_cell("fwd_0__0"), "large")], [(parse_cell("bwd_0__0"), "small")])
    # Two of four devices compute at once, so three of them are slowed down by themselves.
    alone, together = {(0, "large"): 1.5, (1, "small"): 1.0}, {(0, "large"): 2.0, (1, "small"): 2.0}
    assert devices_at_once_of_tasks(plan, [3, 1], alone, together) == 2.0


def test_accelerators_are_timed_one_by_one_and_equal_groups_once(rehearsed, on_accelerators):
    step = lowered(mpmd.Std1F1B(5), [{"data": 1}] * 5)
    found = measure_tasks(step, seconds=0.0)
    assert found.devices_at_once is None and found.together == found.alone
    assert {mpmd_idx for mpmd_idx, _ in rehearsed} < set(range(5))
    assert {device for _, devices in rehearsed for device in devices} == {0}
    for mpmd_idx in range(5):
        assert all((mpmd_idx, e.name) in found.alone for e in found.plan.executables_of(mpmd_idx))


def test_groups_may_have_more_devices_than_there_are():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}, {"data": 4}])
    with pytest.raises(ValueError, match="group 1 has 4 devices, and there are 2"):
        measure_tasks(step, jax.devices()[:2])


def test_tasks_that_call_python_are_not_run():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2, calls_python=True)
    with pytest.raises(ValueError, match="would call these functions of Python"):
        measure_tasks(step)


def rehearsals(program):
    """The programs of all groups, each on the first device."""
    submesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    for mpmd_idx in range(len(program.plan.programs)):
        compiled = {
            executable.name: compile_executable(executable, program.functions[executable.name], submesh)
            for executable in program.plan.executables_of(mpmd_idx)
        }
        yield Rehearsal(program, mpmd_idx, submesh, compiled)


def test_a_group_runs_its_tasks_in_order():
    program = on_equal_groups(2).compiled.program
    for mpmd_idx, rehearsal in enumerate(rehearsals(program)):
        for _ in range(2):  # what a step takes over is there again
            tasks = [(name, event.activity) for name, event in rehearsal.step()]
            assert tasks == [(run.executable, run.task) for run in program.plan.programs[mpmd_idx].runs]


def test_a_step_donates_what_the_one_before_has_returned(monkeypatch):
    program = on_equal_groups(2).compiled.program
    assert any(leaf.donated for leaf in program.plan.inputs)
    for rehearsal in rehearsals(program):
        rehearsal.step()
        with monkeypatch.context() as patch:
            patch.setattr(rehearse, "some_values", lambda aval: pytest.fail(f"{aval} is made again"))
            rehearsal.step()


def test_steps_of_other_precision_are_timed():
    with jax.enable_x64(True):
        step = lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2)
        assert min(measure_tasks(step, seconds=0.0).alone.values()) > 0


def spans(*durations, start=0.0):
    """Tasks of an executable, one behind the other."""
    task, events = parse_cell("fwd_0__0"), []
    for duration in durations:
        events.append(("fwd", Event(0, task, start, start + duration)))
        start += duration
    return events


def test_a_disturbed_step_does_not_count():
    steps = [spans(1.0, 3.0), spans(20.0, 30.0), spans(2.0, 4.0)]
    assert typical_seconds(steps, until=100.0) == {"fwd": 3.0}


def test_what_starts_when_others_have_ended_does_not_count():
    assert typical_seconds([spans(1.0, 1.0, 5.0)], until=2.0) == {"fwd": 1.0}


def test_calls_are_made_until_the_slowest_has_been_made_often_enough():
    first, second = repeat_together([lambda: "first", lambda: time.sleep(0.01) or "second"], 0.0)
    assert len(first) > len(second) == LEAST_CALLS and {*first, *second} == {"first", "second"}


@pytest.mark.parametrize(
    "seconds, calls",
    [
        ([1.0, 1.0], 2),
        ([9.0, 6.0, 5.0, 4.9], 4),
        ([5.0, 7.0], 2),
        ([0.5**n for n in range(9)], MOST_WARM_UPS),
    ],
)
def test_a_call_is_warm_when_it_is_no_longer_quicker(seconds, calls):
    left = list(seconds)
    warm_up(lambda: left.pop(0))
    assert len(seconds) - len(left) == calls


def test_a_failing_call_ends_the_others():
    def fail():
        raise RuntimeError("it fails")

    with pytest.raises(RuntimeError, match="it fails"):
        repeat_together([lambda: None, fail], 1000.0)


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
