"""Marks that dead code takes with it, or brings along."""

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.levels import task_graph
from tests.support.models import batch, init, layer, make_step, mlp, weights
from tests.support.parity import assert_parity, mesh_of


def stages_after_the_loss(params, x, y):
    seen, h = [], x
    for stage in params:
        h = mpmd.mark_stage_end(layer(stage, h))
        seen.append(h)
    return jnp.mean((seen[1] - y) ** 2)


def a_loss_that_reads_no_mark(params, x, y):
    h = mpmd.mark_stage_end(layer(params[0], x))
    h = mpmd.mark_stage_end(layer(params[1], jnp.zeros_like(h)))
    return jnp.mean((layer(params[2], h) - y) ** 2)


def a_second_pass_that_nothing_uses(params, x, y):
    mlp(params, 2 * x)
    return jnp.mean((mlp(params, x) - y) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [stages_after_the_loss, a_loss_that_reads_no_mark, a_second_pass_that_nothing_uses],
    ids=lambda loss: loss.__name__,
)
def test_work_that_is_dead(loss):
    assert_parity(make_step(loss, mpmd.Std1F1B(3)), init(weights(3)), *batch(), mesh=mesh_of(3))


def test_derivatives_through_marks_run_on_one_group_and_say_so():
    def loss(params, x, y):
        h, pull_back = jax.vjp(lambda x: mlp(params, x), x)
        (slope,) = pull_back(jnp.ones_like(h))
        return jnp.mean((h - y) ** 2) + 1e-3 * jnp.mean((jnp.sum(slope**2, -1) - 1) ** 2)

    step = make_step(loss, mpmd.Std1F1B(2))
    with pytest.warns(mpmd.PerformanceWarning, match=r"such as \w+ at .*models.py.* runs in bwd_0, on one"):
        mpmd.jit(step, mpmd.AbstractMpmdMesh({"stage": 2}, "stage")).lower(init(weights(2)), *batch())


def test_the_last_stage_of_a_loss_under_jit_keeps_its_backward():
    @jax.jit
    def loss(params, x, y):
        return jnp.mean((mlp(params, x) - y) ** 2)

    step = make_step(loss, mpmd.Std1F1B(2))
    plain = make_step(lambda params, x, y: jnp.mean((mlp(params, x) - y) ** 2), mpmd.Std1F1B(2))
    graphs = [task_graph(fun, init(weights(2)), *batch(), groups=2) for fun in (step, plain)]
    sizes = [{str(member.work): len(member.eqns) for member in graph.stage_work} for graph in graphs]
    assert sizes[0] == sizes[1]


def homes(loss, params, stages):
    """The group of each parameter, by its path, in a plan without devices."""
    step = make_step(loss, mpmd.Std1F1B(stages))
    mesh = mpmd.AbstractMpmdMesh({"stage": stages}, "stage")
    plan = mpmd.jit(step, mesh).lower(init(params), *batch()).plan
    return [leaf.mpmd_idxs for leaf in plan.inputs if leaf.path.startswith("args[0]")]


@pytest.mark.parametrize("stages", [2, 3])
def test_models_that_do_not_depend_on_one_another_pass_the_same_stages(stages):
    def loss(models, x, y):
        return jnp.mean((mlp(models[0], x) - mlp(models[1], y)) ** 2)

    own = [(stage,) for stage in range(stages) for _ in "bw"]
    assert homes(loss, [weights(stages)] * 2, stages) == own * 2


def test_a_model_that_reads_anothers_result_has_stages_of_its_own():
    def loss(models, x, y):
        return jnp.mean((mlp(models[1], mpmd.mark_stage_end(mlp(models[0], x))) - y) ** 2)

    assert homes(loss, [weights(2)] * 2, 4) == [(stage,) for stage in range(4) for _ in "bw"]


def test_branches_that_are_a_stage_each():
    """There are as many marks as stages, but they do not stand one behind the other."""

    def loss(params, x, y):
        first = mpmd.mark_stage_end(layer(params[0], x))
        second = mpmd.mark_stage_end(layer(params[1], x))
        return jnp.mean((layer(params[2], first + second) - y) ** 2)

    assert homes(loss, weights(3), 3) == [(stage,) for stage in range(3) for _ in "bw"]


def test_models_with_too_few_marks_each():
    def loss(models, x, y):
        return jnp.mean((mlp(models[0], x) - mlp(models[1], y)) ** 2)

    with pytest.raises(mpmd.CompileError, match=r"has 4 calls .*, which end 2 stages, .* 6 marks"):
        homes(loss, [weights(3)] * 2, 7)


def test_marks_of_a_function_that_is_called_for_each_stage():
    stage = jax.jit(lambda p, h: mpmd.mark_stage_end(layer(p, h)))

    def loss(params, x, y):
        for p in params:
            x = stage(p, x)
        return jnp.mean((x - y) ** 2)

    assert homes(loss, weights(3), 3) == [(stage,) for stage in range(3) for _ in "bw"]
