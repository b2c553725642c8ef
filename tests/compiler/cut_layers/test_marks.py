"""Marks that dead code takes with it, or brings along."""

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.levels import task_graph
from tests.support.models import batch, layer, mlp, mse, planned, sgd_step, squares, weights
from tests.support.parity import assert_parity, mesh_of


def stages_after_the_loss(params, x, y):
    seen, h = [], x
    for stage in params:
        h = mpmd.mark_stage_end(layer(stage, h))
        seen.append(h)
    return squares(seen[1], y)


def a_loss_that_reads_no_mark(params, x, y):
    h = mpmd.mark_stage_end(layer(params[0], x))
    h = mpmd.mark_stage_end(layer(params[1], jnp.zeros_like(h)))
    return squares(layer(params[2], h), y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [stages_after_the_loss, a_loss_that_reads_no_mark],
    ids=lambda loss: loss.__name__,
)
def test_work_that_is_dead(loss):
    assert_parity(sgd_step(loss, mpmd.Std1F1B(3)), weights(3), *batch(), mesh=mesh_of(3))


def test_the_last_stage_of_a_loss_under_jit_keeps_its_backward():
    steps = [sgd_step(loss, mpmd.Std1F1B(2)) for loss in (jax.jit(mse), mse)]
    graphs = [task_graph(step, weights(2), *batch(), groups=2) for step in steps]
    sizes = [{str(member.work): len(member.eqns) for member in graph.stage_work} for graph in graphs]
    assert sizes[0] == sizes[1]


def homes(loss, params, stages):
    """The groups of the parameters, in a plan without devices."""
    lowered = planned(sgd_step(loss, mpmd.Std1F1B(stages)), params, *batch(), groups=stages)
    return [leaf.mpmd_idxs for leaf in lowered.plan.inputs[:-2]]


def of_each(stages):
    """A bias and a weight on each group."""
    return [(stage,) for stage in range(stages) for _ in "bw"]


def siamese(models, x, y):
    return jnp.mean((mlp(models[0], x) - mlp(models[1], y)) ** 2)


@pytest.mark.parametrize("stages", [2, 3])
def test_models_that_do_not_depend_on_one_another_pass_the_same_stages(stages):
    assert homes(siamese, [weights(stages)] * 2, stages) == of_each(stages) * 2


def test_a_model_that_reads_anothers_result_has_stages_of_its_own():
    def loss(models, x, y):
        return squares(mlp(models[1], mpmd.mark_stage_end(mlp(models[0], x))), y)

    assert homes(loss, [weights(2)] * 2, 4) == of_each(4)


def test_branches_that_are_a_stage_each():
    """There are as many marks as stages, but they do not stand one behind the other."""

    def loss(params, x, y):
        first = mpmd.mark_stage_end(layer(params[0], x))
        second = mpmd.mark_stage_end(layer(params[1], x))
        return squares(layer(params[2], first + second), y)

    assert homes(loss, weights(3), 3) == of_each(3)


def test_models_with_too_few_marks_each():
    with pytest.raises(mpmd.CompileError, match=r"has 4 calls .*, which end 2 stages, .* 6 marks"):
        homes(siamese, [weights(3)] * 2, 7)


def test_marks_of_a_function_that_is_called_for_each_stage():
    stage = jax.jit(lambda p, h: mpmd.mark_stage_end(layer(p, h)))

    def loss(params, x, y):
        for p in params:
            x = stage(p, x)
        return squares(x, y)

    assert homes(loss, weights(3), 3) == of_each(3)
