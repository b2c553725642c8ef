"""Schedules that run the gradient of a stage's input and that of its weights as tasks of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.compiler.jaxprs.equations import subjaxprs
from mpmd.ir.plan import Task
from tests.support.levels import task_graph
from tests.support.models import Last, batch, layer, mse, mse_of, planned, sgd_step, squares, stack, weights
from tests.support.parity import assert_parity, mesh_of


@dataclasses.dataclass(frozen=True)
class WeightsLast(mpmd.Schedule):
    """All forwards, all backwards of which every third is whole, then the gradients of weights."""

    def tasks(self, num_microbatches):
        whole = range(2, num_microbatches, 3)
        halved = [i for i in range(num_microbatches) if i not in whole]
        return [
            [
                *(Task("fwd", stage, i) for i in range(num_microbatches)),
                *(Task("bwd" if i in whole else "bwdA", stage, i) for i in range(num_microbatches)),
                *(Task("bwdW", stage, i) for i in halved),
            ]
            for stage in range(self.num_stages)
        ]


def check(loss, params, stages):
    step = sgd_step(loss, WeightsLast(stages, stages))
    return assert_parity(step, params, *batch(4), mesh=mesh_of(stages))


def through(stage):
    def loss(params, x, y):
        h = x
        for p in params:
            h = mpmd.mark_stage_end(stage(p, h))
        return squares(h, y)

    return loss


def products(loss, params, stages):
    """How many matrix products each work of the loop has, those of a scan once for each iteration."""
    step = sgd_step(loss, WeightsLast(stages, stages))
    graph = task_graph(step, params, *batch(4), groups=stages)
    return {str(stage.work): count_products(stage.eqns) for stage in graph.stage_work}


def count_products(eqns):
    total = 0
    for eqn in eqns:
        inner = sum(count_products(jaxpr.eqns) for jaxpr in subjaxprs(eqn))
        total += (eqn.primitive.name == "dot_general") + inner * eqn.params.get("length", 1)
    return total


def test_halves_and_whole_backwards_of_one_stage():
    loaded = check(mse, weights(3), 3)
    labels = [run.label for run in loaded.plan.programs[1].runs]
    assert labels.index("bwdA_1__3") < labels.index("bwdW_1__0")
    assert "bwd_1__2" in labels


def scanned(stage, h):
    return jax.lax.scan(lambda h, p: (layer(p, h), None), h, stage)[0]


def scanned_with_checkpoints(stage, h):
    return jax.lax.scan(lambda h, p: (jax.checkpoint(layer)(p, h), None), h, stage)[0]


def scanned_with_a_shared_weight(stage, h):
    shared = stage["w"][0]
    return jax.lax.scan(lambda h, p: (jnp.tanh(layer(p, h) + h @ shared), h), h, stage)[0]


def scanned_twice(stage, h):
    return jax.lax.scan(lambda h, _: (scanned(stage, h) / 2, None), h, None, length=2)[0]


def scanned_again_in_the_backward(stage, h):
    def body(h, _):
        return jnp.tanh(h @ stage["w"][0]) + stage["b"][0], None

    return jax.checkpoint(lambda h: jax.lax.scan(body, h, None, length=2)[0])(h)


@pytest.mark.parametrize(
    ("stage", "forward", "halves"),
    [
        (scanned, 3, (3, 3)),
        (scanned_with_checkpoints, 3, (6, 3)),
        (scanned_with_a_shared_weight, 6, (6, 6)),
        (scanned_twice, 6, (6, 6)),
    ],
    ids=["scan", "checkpoint", "shared", "nested"],
)
def test_a_scan_over_layers_is_taken_apart(stage, forward, halves):
    counts = products(through(stage), [stack(weights(3)) for _ in range(3)], 3)
    assert (counts["fwd_1"], (counts["bwdA_1"], counts["bwdW_1"])) == (forward, halves)


def conditional(p, h):
    return jax.lax.cond(jnp.sum(h) > 0, lambda: layer(p, h), lambda: h + p["b"])


def test_results_of_stages_of_several_kinds_are_those_of_plain_jax():
    """Also of a result of a scan that is the scan's input."""
    stages = jax.jit(layer), jax.checkpoint(layer), conditional, scanned_again_in_the_backward, scanned_twice

    check(functools.partial(mse_of, stages), [*weights(3), stack(weights(1)), stack(weights(2))], 5)


def test_stages_without_weights_or_input_gradient_have_one_half():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        h = mpmd.mark_stage_end(jnp.sin(h))
        return squares(layer(params[1], h), y)

    loaded = check(loss, weights(2), 3)
    assert {run.label[:4] for run in loaded.plan.programs[0].runs if run.label.startswith("bwd")} == {
        "bwdW",
        "bwd_",
    }
    assert {run.label[:4] for run in loaded.plan.programs[1].runs if run.label.startswith("bwd")} == {
        "bwdA",
        "bwd_",
    }


@dataclasses.dataclass(frozen=True)
class Descending(mpmd.Schedule):
    """The last microbatch first."""

    def tasks(self, num_microbatches):
        order = range(num_microbatches - 1, -1, -1)
        return [
            [Task(kind, stage, i) for kind in ("fwd", "bwd") for i in order]
            for stage in range(self.num_stages)
        ]


def test_any_order_of_microbatches_gives_the_sums_the_maxima_and_the_stacks():
    assert_parity(sgd_step(mse, Descending(3, 3)), weights(3), *batch(), mesh=mesh_of(3))


def test_an_operation_that_goes_by_order_refuses_another_one():
    def step(params, xs, ys):
        return mpmd.treduce(lambda mb: mse(params, *mb), (xs, ys), Descending(2, 2), operation=Last())

    with pytest.raises(mpmd.CompileError, match=r"runs fwd_1__3 before fwd_1__2, but a"):
        planned(step, weights(2), *batch(4))


def test_a_product_with_a_weight_of_two_later_stages_is_in_the_first_of_them():
    def loss(params, x, y):
        first = layer(params[0], x)
        h = mpmd.mark_stage_end(layer(params[1], mpmd.mark_stage_end(first)))
        return squares(layer(params[1], h), y) + jnp.mean((first @ params[1]["w"]) ** 2)

    counts = products(loss, weights(2), 3)
    assert (counts["fwd_0"], counts["fwd_1"], counts["fwd_2"]) == (1, 2, 1)
