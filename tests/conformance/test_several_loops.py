"""What users see of a step with several loops: where stages are, and what tasks are called."""

import functools

import jax
import pytest

import mpmd
from mpmd.ir.plan import OutsideTask, Send
from mpmd.render.chart import Chart
from mpmd.simulate import Costs
from tests.support import models
from tests.support.models import batch, descend, mlp, mse, squares, weights
from tests.support.programs.several_loops import gradients, microbatches

pytestmark = pytest.mark.usefixtures("quick_compiles")

planned = functools.partial(models.planned, groups=4)


def groups_of_stages(step):
    """The group of each stage, as the plan has them."""
    found = {
        member.stage: program.mpmd_idx
        for program in step.plan.programs
        for run in program.runs
        if not isinstance(run.task, OutsideTask)
        for member in run.task.tasks
    }
    return [found[stage] for stage in sorted(found)]


def epochs(*schedules, loss=mse):
    """A step with a loop for each schedule, each with an update behind it."""

    def step(params, xs, ys):
        losses = []
        for schedule in schedules:
            total, grads = gradients(loss, params, (xs, ys), schedule)
            params = descend(params, grads)
            losses.append(total)
        return params, losses

    return step


def the_end_and_then_all(params, xs, ys):
    """The first loop updates the parameters of all layers but the first, the second loop updates all."""
    first, *others = params
    one, grads = gradients(mse, others, (xs, ys), mpmd.GPipe(3))
    params = [first, *descend(others, grads)]
    two, grads = gradients(mse, params, (xs, ys), mpmd.Std1F1B(4))
    return descend(params, grads), (one, two)


PLACED = {
    "on a part of the groups": (
        epochs(mpmd.GPipe(2), mpmd.Std1F1B(2), loss=lambda p, x, y: mse(p[:2], x, y)),
        [0, 1, 0, 1],
    ),
    "the end of a model": (the_end_and_then_all, [0, 1, 2, 3, 0, 1, 2]),
    "several stages on a group": (
        epochs(mpmd.Std1F1B(4), mpmd.Interleaved1F1B(4, 2)),
        [0, 1, 2, 3, 0, 1, 0, 1],
    ),
}


@pytest.mark.parametrize(("step", "groups"), PLACED.values(), ids=PLACED)
def test_stages_are_where_their_weights_are(step, groups):
    assert groups_of_stages(planned(step, weights(4), *batch())) == groups


def test_no_weight_moves_between_loops():
    step = planned(epochs(mpmd.Std1F1B(4), mpmd.ZeroBubble(4)), weights(4), *batch())
    between = [
        name
        for program in step.plan.programs
        for i in program.instructions
        if isinstance(i, Send)
        for name in i.values
        if name.startswith(("before", "between", "after"))
    ]
    assert not between
    assert all(len(leaf.mpmd_idxs) == 1 for leaf in step.plan.inputs[:8])


def test_equal_tasks_of_all_loops_share_executables():
    step = planned(epochs(mpmd.Std1F1B(4), mpmd.Std1F1B(4), mpmd.Std1F1B(4)), weights(4), *batch())
    kinds = {"fwd", "bwd"}
    names = {executable.name for executable in step.plan.executables}
    assert {name for name in names if name.split("_")[0] in kinds} == {
        *(f"fwd_{stage}" for stage in (0, 1, 3)),
        *(f"bwd_{stage}" for stage in (0, 2, 3)),
    }


def test_the_explanation_and_the_report_name_the_loops():
    step = planned(epochs(mpmd.Std1F1B(4), mpmd.Interleaved1F1B(4, 4)), weights(4), *batch())
    said = (
        "loops:\n  loop 0, Std1F1B: stages 0 to 3, 4 microbatches\n  loop 1, Interleaved1F1B: stages 4 to 7"
    )
    explanation = mpmd.explain(step)
    for text in (explanation, step.report(), step.plan):
        assert said in str(text)
    assert "shared weight" not in str(explanation)
    weight = str(explanation.leaf("args[0][1]['w']"))
    assert "between_1__0" in weight and "bwd_1" in weight and "bwd_5" in weight
    assert "loops:" not in str(mpmd.explain(planned(epochs(mpmd.Std1F1B(4)), weights(4), *batch())))


def test_the_simulation_and_the_chart_have_both_loops():
    def step(params, xs, ys):
        one, grads = gradients(mse, params, (xs, ys), mpmd.Std1F1B(4))
        params = descend(params, grads)
        return params, one + gradients(mse, params, microbatches((xs, ys), 2), mpmd.GPipe(4))[0]

    plan = planned(step, weights(4), *batch())
    costs = Costs(kinds={"fwd": 1, "bwd": 1}, tasks={("fwd", 4): 3})
    simulation = plan.simulate(costs)
    ends = {event.label: event.end for event in simulation.events}
    # A stage of the second loop begins when its own last backward is done: its weights are updated there.
    assert ends["fwd_4__0"] == ends["bwd_0__3"] + 3
    chart = Chart.of(simulation, of_plan=True)
    assert chart.size == "4 groups, 8 stages, 4 and 2 microbatches"
    assert chart.stages == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_measured_costs_tell_loops_apart(mesh):
    step = mpmd.jit(epochs(mpmd.Std1F1B(2), mpmd.GPipe(2)), mesh).compile(weights(2), *batch())
    _, events = step.profile(weights(2), *batch())
    costs = Costs.measured(events)
    assert {stage for _, stage in costs.tasks} == {0, 1, 2, 3}
    assert (0, OutsideTask("between", 0, 1)) in costs.outside
    assert step.simulate(costs).makespan > 0


def test_a_failing_task_says_of_which_loop_it_is(mesh):
    def explode(h):
        raise ArithmeticError("too hot")

    def hot(params, x, y):
        h = mlp(params, x)
        return squares(h + jax.pure_callback(explode, h, jax.lax.stop_gradient(h)), y)

    step = epochs(mpmd.Std1F1B(2), mpmd.GPipe(2), loss=hot)
    params, _ = mpmd.jit(step, mesh)(weights(2), *batch())
    said = r"(?s)fwd_1__0 \(stage 1 of loop 0\) failed on group 1: .*too hot"
    with pytest.raises(mpmd.TaskError, match=said) as caught:
        jax.block_until_ready(params)
    assert (caught.value.mpmd_idx, caught.value.label) == (1, "fwd_1__0")
