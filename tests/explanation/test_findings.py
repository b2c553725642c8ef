"""What ``mpmd.explain`` and the report find: work, backwards, values sent again, and loops over groups."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.models import batch, layer, mse, planned, sgd_step, squares, weights
from tests.support.programs.table import trains


def lowered(loss, params, groups, data=None):
    return planned(sgd_step(loss, mpmd.Std1F1B(groups)), params, *(data or batch()), groups=groups)


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
    return squares(h, y)


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
    """The planned step of two models of that width."""
    w = {"w": floats(width, width), "b": floats(width)}
    return lowered(two_models, ([w] * 3, [w] * 9), 4, (floats(4, 8, width),) * 2)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_compiling_warns_of_it_where_operations_take_time():
    """Planned for shapes alone, and at width 64 without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide(64)
    with pytest.warns(mpmd.PerformanceWarning, match=r"group 3 \(stage 3\) has 77% of the operations"):
        wide(1024)


def test_devices_count():
    """A group with twice the work of the others and twice the devices is not slower."""
    step, args = sgd_step(two_models, mpmd.Std1F1B(2)), ((weights(1), weights(5)), *batch())
    findings = [
        mpmd.explain(mpmd.jit(step, mpmd.AbstractMpmdMesh(groups)).lower(*args)).findings
        for groups in ([{"data": 1}, {"data": 1}], [{"data": 1}, {"data": 4}])
    ]
    assert [len(found) for found in findings] == [1, 0]


def test_groups_without_stages_do_not_count():
    step = planned(sgd_step(mse, mpmd.Std1F1B(2)), weights(2), *batch(), groups=4)
    assert mpmd.explain(step).findings == ()


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

    assert mpmd.explain(planned(evaluate, weights(3), *batch(), groups=3)).findings == ()


def test_a_value_that_is_the_same_in_every_microbatch():
    """A product of weights that is too expensive to be computed by each reader, and passes a mark."""

    def loss(params, x, y):
        first, second = params
        table = first["w"] @ first["w"]
        h, table = mpmd.mark_stage_end((x @ table, table))
        return squares(layer(second, h) @ table, y)

    (finding,) = mpmd.explain(lowered(loss, weights(2), 2)).findings
    assert finding.startswith(
        "the same value is sent in every microbatch, float32[4,4] (64 B at test_findings"
    )
    assert "4 times, from group 0 to 1" in finding


def test_values_of_microbatches_are_not_the_same():
    """Such as activations, and a batch that is passed on."""

    def loss(params, x, y):
        h, x = mpmd.mark_stage_end((layer(params[0], x), x))
        return squares(layer(params[1], h) + x, y)

    assert mpmd.explain(lowered(loss, weights(2), 2)).findings == ()


def norm(grads):
    return sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))


def halved(grads):
    return jax.tree.map(lambda g: g / 2, grads)


def summed_over_all(grads):
    return jax.lax.fori_loop(0, 3, lambda i, c: (halved(c[0]), c[1] + norm(c[0])), (grads, 0.0))


def until_all_are_small(grads):
    return jax.lax.while_loop(lambda g: norm(g) > 0.1, halved, grads), 0.0


def clipped_in_each_iteration(grads):
    def body(grads, _):
        rate = 1 / (1 + norm(grads))
        return jax.tree.map(lambda g: g * rate, grads), None

    return jax.lax.scan(body, grads, length=2)[0], 0.0


def printed_in_each_iteration(grads):
    def body(carry):
        jax.debug.print("{}", carry[0])
        return carry[0] + 1, halved(carry[1])

    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, grads))[1], 0.0


def mapped_over_a_stack(grads):
    first, second = grads
    matrices = jax.lax.map(jnp.sin, jnp.stack([first["w"], second["w"]]))
    return [{**first, "w": matrices[0]}, {**second, "w": matrices[1]}], 0.0


def trained_with(iterate):
    """The planned step of two groups that descends by the gradients that ``iterate`` gives."""

    def step(params, xs, ys):
        total, grads = trains(params, (xs, ys), stages=2)
        grads, more = iterate(grads)
        return jax.tree.map(lambda p, g: p - g, params, grads), (total, more)

    return planned(step, weights(2), *batch())


@pytest.mark.parametrize(
    "iterate, nbytes",
    [
        (summed_over_all, 80),
        (until_all_are_small, 80),
        (clipped_in_each_iteration, 80),
        (printed_in_each_iteration, 80),
        (mapped_over_a_stack, 64),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_loop_that_one_group_runs_for_all(iterate, nbytes):
    """Of two layers, one is sent: a matrix of 64 bytes, and a bias of 16."""
    with pytest.warns(mpmd.PerformanceWarning) as caught:
        step = trained_with(iterate)
    (finding,) = mpmd.explain(step).findings
    assert [str(warning.message) for warning in caught] == [finding]
    where = rf"the loop at \S*test_findings.py:\d+ \({iterate.__name__}\) runs on group 0 alone"
    assert re.match(rf"{where}, and other groups send {nbytes} B there for it in every step", finding)
    assert "Write a loop for each array, such as jax.tree.map(" in finding


def test_the_ways_that_it_says_to_write_it():
    def loop_for_each_array(grads):
        return jax.tree.map(lambda g: jax.lax.while_loop(lambda g: norm(g) > 0.1, halved, g), grads), 0.0

    def python_loop(grads):
        for _ in range(3):
            large = norm(grads) > 0.1
            grads = jax.tree.map(lambda g, large=large: jnp.where(large, g / 2, g), grads)
        return grads, 0.0

    def scalar_alone(grads):
        """A search for a rate, which reads the norm of all, carries no array."""
        total = norm(grads)
        rate = jax.lax.while_loop(lambda rate: rate * total > 0.1, lambda rate: rate / 2, 1.0)
        return jax.tree.map(lambda g: rate * g, grads), rate

    for iterate in (loop_for_each_array, python_loop, scalar_alone):
        assert mpmd.explain(trained_with(iterate)).findings == ()
