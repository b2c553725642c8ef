"""Loops whose equations are all cheap enough for their readers to compute them."""

import jax.numpy as jnp

import mpmd
from mpmd.ir.plan import OutsideTask
from tests.support.models import batch, planned, sgd_step, squares


def test_a_model_whose_weights_are_all_single_numbers_is_cut_at_its_marks():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(jnp.tanh(x * sum(params[0]) + params[1]))
        return squares(h * sum(params[2]), y)

    one = jnp.float32(0.5)
    plan = planned(sgd_step(loss, mpmd.Std1F1B(2)), [[one, one], one, [one, one]], *batch()).plan
    for program in plan.programs:
        types = {run.task.type for run in program.runs if not isinstance(run.task, OutsideTask)}
        assert types == {("fwd", program.mpmd_idx), ("bwd", program.mpmd_idx)}


def test_a_loop_without_weights_is_computed_outside():
    def step(xs, scale):
        total = mpmd.treduce(
            lambda x: jnp.sum(mpmd.mark_stage_end(jnp.tanh(x)) ** 2),
            xs,
            mpmd.ForwardOnly(2, 2),
            operation=mpmd.Add,
        )
        return total * scale

    xs, _ = batch()
    plan = planned(step, xs, jnp.float32(2)).plan
    assert {type(run.task) for program in plan.programs for run in program.runs} == {OutsideTask}
