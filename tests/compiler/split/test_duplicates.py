"""Loops whose equations are all cheap enough for their readers to compute them."""

import jax.numpy as jnp
import pytest

import mpmd
from mpmd.ir.plan import OutsideTask
from tests.support.models import batch, planned, sgd_step, squares
from tests.support.parity import assert_parity, mesh_of


def loss(params, x, y):
    """Stages that scale and shift a microbatch by sums of their parameters."""
    h = x
    for i, stage in enumerate(params):
        h = jnp.tanh(h * sum(stage["w"]) + stage["b"])
        if i < len(params) - 1:
            h = mpmd.mark_stage_end(h)
    return squares(h, y)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_model_whose_weights_are_all_single_numbers_is_cut_at_its_marks(shape):
    params = [
        {"w": [jnp.full(shape, 0.1 * (i + k)) for k in range(3)], "b": jnp.zeros(shape)} for i in (1, 2)
    ]
    step = sgd_step(loss, mpmd.Std1F1B(2))
    loaded = assert_parity(step, params, *batch(), mesh=mesh_of(2))
    for program in loaded.plan.programs:
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
