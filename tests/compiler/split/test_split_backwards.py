"""Schedules that run the gradient of a stage's input and that of its weights as tasks of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.compiler.jaxprs.equations import subjaxprs
from mpmd.ir.plan import Task
from tests.support.levels import task_graph
from tests.support.models import Last, batch, layer, mse, planned, sgd_step, squares, stack, weights


def through(stage):
    def loss(params, x, y):
        h = x
        for p in params:
            h = mpmd.mark_stage_end(stage(p, h))
        return squares(h, y)

    return loss


def products(loss, params, stages):
    """How many matrix products each work of the loop has, those of a scan once for each iteration."""
    step = sgd_step(loss, mpmd.ZeroBubble(stages))
    graph = task_graph(step, params, *batch(4), groups=stages)
    return {str(stage.work): count_products(stage.eqns) for stage in graph.stage_work}


def count_products(eqns):
    total = 0
    for eqn in eqns:
        inner = sum(count_products(jaxpr.eqns) for jaxpr in subjaxprs(eqn))
        total += (eqn.primitive.name == "dot_general") + inner * eqn.params.get("length", 1)
    return total


def scanned(stage, h):
    return jax.lax.scan(lambda h, p: (layer(p, h), None), h, stage)[0]


def scanned_with_checkpoints(stage, h):
    return jax.lax.scan(lambda h, p: (jax.checkpoint(layer)(p, h), None), h, stage)[0]


def scanned_with_a_shared_weight(stage, h):
    shared = stage["w"][0]
    return jax.lax.scan(lambda h, p: (jnp.tanh(layer(p, h) + h @ shared), h), h, stage)[0]


def scanned_twice(stage, h):
    return jax.lax.scan(lambda h, _: (scanned(stage, h) / 2, None), h, None, length=2)[0]


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


def test_stages_without_weights_or_input_gradient_have_one_half():
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        h = mpmd.mark_stage_end(jnp.sin(h))
        return squares(layer(params[1], h), y)

    plan = planned(sgd_step(loss, mpmd.ZeroBubble(3)), weights(2), *batch(), groups=3).plan
    halves = [{run.label[:4] for run in program.runs if "bwd" in run.label} for program in plan.programs]
    assert halves == [{"bwdW"}, {"bwdA"}, {"bwdA", "bwdW"}]


@dataclasses.dataclass(frozen=True)
class Descending(mpmd.Schedule):
    """The last microbatch first."""

    def tasks(self, num_microbatches):
        order = range(num_microbatches - 1, -1, -1)
        return [
            [Task(kind, stage, i) for kind in ("fwd", "bwd") for i in order]
            for stage in range(self.num_stages)
        ]


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
