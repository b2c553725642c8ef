"""Tasks that are measured one by one, for a step that is only planned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.ir import Executable, GroupProgram, OutsideTask, Plan, Run, parse_cell
from mpmd.planner.trials import measure
from mpmd.planner.trials.measure import costs_of, measure_tasks
from mpmd.planner.trials.timing import Call, seconds_together, while_all_run
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


@pytest.fixture
def timed(monkeypatch):
    """The calls that are timed together, which take a second."""
    timed = []
    monkeypatch.setattr(measure, "seconds_together", lambda calls, seconds: timed.append(calls) or 1.0)
    return timed


def devices_of(calls):
    """The devices of the inputs of each call."""
    return [sorted({device.id for x in call.inputs for device in x.sharding.device_set}) for call in calls]


def test_equal_executables_are_run_once(timed):
    step = lowered(mpmd.Std1F1B(4), [{"data": 1}] * 4)
    found = measure_tasks(step)
    runs = sum(len(program.runs) for program in step.plan.programs)
    assert len(timed) == len(step.plan.executables) < runs
    tasks = costs_of(found.plan, found.seconds).tasks
    assert tasks["fwd", 1] == tasks["fwd", 2] == 1.0


@pytest.mark.parametrize("available, together", [(8, [[0, 1], [2, 3], [4, 5]]), (5, [[0, 1], [2, 3]])])
def test_groups_that_share_their_host_are_at_work_together(timed, available, together):
    step = lowered(mpmd.Std1F1B(3), [{"data": 2}] * 3)
    found = measure_tasks(step, jax.devices()[:available])
    assert found.together == (len(together),) * 3
    assert all(devices_of(calls) == together for calls in timed if calls[0].inputs)


def test_groups_of_several_sizes_are_beside_groups_of_their_own(timed):
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}, {"data": 4}], in_specs=(None, P(None, "data")))
    assert measure_tasks(step, jax.devices()[:6]).together == (2, 1)
    assert {tuple(map(len, devices_of(calls))) for calls in timed if calls[0].inputs} == {(1, 1), (4,)}


def test_accelerators_do_not_share(timed, monkeypatch):
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2)
    monkeypatch.setattr(measure, "_share_host", lambda devices: False)
    assert measure_tasks(step).together == (1, 1) and {len(calls) for calls in timed} == {1}


def test_groups_may_have_more_devices_than_there_are():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}, {"data": 4}])
    with pytest.raises(ValueError, match="group 1 has 4 devices, and there are 2"):
        measure_tasks(step, jax.devices()[:2])


def test_tasks_that_call_python_are_not_run():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2, calls_python=True)
    with pytest.raises(ValueError, match="would call these functions of Python"):
        measure_tasks(step)


def test_a_call_gets_copies_of_what_it_takes_over():
    step = jax.jit(lambda x, y: (x + y,), donate_argnums=0)
    x, y = jnp.ones(4), jnp.ones(4)
    assert seconds_together([Call(step.lower(x, y).compile(), [x, y], (0,))], 0.0) > 0
    np.testing.assert_array_equal(x, np.ones(4))


def test_calls_are_made_by_threads_in_the_context_of_the_caller():
    with jax.enable_x64(True):
        x = jnp.ones(4, jnp.float64)
        calls = [Call(jax.jit(lambda x: (x + 1,)).lower(x).compile(), [x], ())] * 3
        assert seconds_together(calls, 0.0) > 0


def test_what_runs_when_others_have_ended_does_not_count():
    first = [(0.0, 1.0), (1.0, 3.0)]
    second = [(0.0, 2.0), (2.0, 5.0), (5.0, 5.5), (5.5, 6.0)]
    assert while_all_run([first, second]) == [1.0, 2.0, 2.0, 3.0]


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
