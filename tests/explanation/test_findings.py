"""What ``mpmd.explain`` and the report find: too much work, no backward, and values sent again."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.models import batch, init, layer, make_step, mse, weights


def lowered(loss, params, groups, data=None, **options):
    step = make_step(loss, mpmd.Std1F1B(groups), **options)
    mesh = mpmd.AbstractMpmdMesh({"stage": groups}, "stage")
    return mpmd.jit(step, mesh).lower(*jax.eval_shape(lambda: (init(params), *(data or batch()))))


def test_an_even_pipeline_has_no_findings():
    step = lowered(mse, weights(4), 4)
    assert mpmd.explain(step).findings == step.report().findings == ()
    assert "look at this" not in str(step.report())


def two_models(params, x, y):
    """The first one is marked, and the second comes after all marks."""
    first, second = params
    h = x
    for stage in first:
        h = mpmd.mark_stage_end(layer(stage, h))
    for stage in second:
        h = layer(stage, h)
    return jnp.mean((h - y) ** 2)


def test_a_group_with_most_of_the_work():
    step = lowered(two_models, (weights(3), weights(9)), 4)
    (finding,) = mpmd.explain(step).findings
    assert finding.startswith(
        "group 3 (stage 3) has 76% of the operations of the loop, of which 25% would be"
    )
    simulated = re.search(r"with equal stages the step would take (.*)% less, by a simulation", finding)
    assert 40 < float(simulated[1]) < 75, "the stages take 1, 1, 1 and 9, and a pipeline fills and drains"
    assert finding in str(mpmd.explain(step)) and finding in str(step.report())


def wide(width):
    """Weights and a batch of that width."""
    w = {"w": jnp.zeros((width, width)), "b": jnp.zeros(width)}
    return ([w] * 3, [w] * 9), (jnp.zeros((4, 8, width)), jnp.zeros((4, 8, width)))


def test_compiling_warns_of_it_where_operations_take_time():
    """Planned for shapes alone, and at width 64 without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(two_models, *_with_groups(wide(64)))
    with pytest.warns(mpmd.PerformanceWarning, match=r"group 3 \(stage 3\) has 77% of the operations"):
        lowered(two_models, *_with_groups(wide(1024)))


def _with_groups(sizes):
    params, data = sizes
    return params, 4, data


def test_devices_count():
    """A group with twice the work of the others and twice the devices is not slower."""
    step = make_step(two_models, mpmd.Std1F1B(2))
    shapes = jax.eval_shape(lambda: (init((weights(1), weights(5))), *batch()))
    findings = [
        mpmd.explain(mpmd.jit(step, mpmd.AbstractMpmdMesh(groups)).lower(*shapes)).findings
        for groups in ([{"data": 1}, {"data": 1}], [{"data": 1}, {"data": 4}])
    ]
    assert [len(found) for found in findings] == [1, 0]


def test_groups_without_stages_do_not_count():
    step = make_step(mse, mpmd.Std1F1B(2))
    mesh = mpmd.AbstractMpmdMesh({"stage": 4}, "stage")
    lowered = mpmd.jit(step, mesh).lower(*jax.eval_shape(lambda: (init(weights(2)), *batch())))
    assert mpmd.explain(lowered).findings == ()


def test_a_group_without_a_backward():
    def frozen_first(params, x, y):
        first, *others = params
        h = mpmd.mark_stage_end(layer(jax.lax.stop_gradient(first), x))
        return mse(others, h, y)

    (finding,) = mpmd.explain(lowered(frozen_first, weights(3), 3)).findings
    assert finding.startswith("group 0 runs no backward")


def test_forwards_alone_need_no_backward():
    def evaluate(params, xs, ys):
        schedule = mpmd.ForwardOnly(3, 3)
        return mpmd.treduce(lambda mb: mse(params, *mb), (xs, ys), schedule=schedule, operation=mpmd.Add)

    step = mpmd.jit(evaluate, mpmd.AbstractMpmdMesh({"stage": 3}, "stage"))
    assert mpmd.explain(step.lower(weights(3), *batch())).findings == ()


def test_a_value_that_is_the_same_in_every_microbatch():
    """A product of weights that is too expensive to be computed by each reader, and passes a mark."""

    def loss(params, x, y):
        first, second = params
        table = first["w"] @ first["w"]
        h, table = mpmd.mark_stage_end((x @ table, table))
        return jnp.mean((layer(second, h) @ table - y) ** 2)

    (finding,) = mpmd.explain(lowered(loss, weights(2), 2)).findings
    assert finding.startswith(
        "the same value is sent in every microbatch, float32[4,4] (64 B at test_findings"
    )
    assert "4 times, from group 0 to 1" in finding


def test_values_of_microbatches_are_not_the_same():
    """Such as activations, and a batch that is passed on."""

    def loss(params, x, y):
        h, x = mpmd.mark_stage_end((layer(params[0], x), x))
        return jnp.mean((layer(params[1], h) + x - y) ** 2)

    assert mpmd.explain(lowered(loss, weights(2), 2)).findings == ()
