"""A user's loss is called once for a compile, whoever differentiates it and wherever its marks come from."""

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.models import batch, descend, layer, planned, squares, weights
from tests.support.planned_steps import CLUSTER

SCHEDULE = mpmd.Std1F1B(2)


class Counted:
    """A loss that counts its calls."""

    def __init__(self, mark=lambda h: h, returns=lambda loss, h: loss):
        self.mark, self.returns, self.calls = mark, returns, 0

    def __call__(self, params, x, y):
        self.calls += 1
        h = self.mark(layer(params[0], x))
        h = layer(params[1], h)
        return self.returns(squares(h, y), h)


def rows_of(microbatches):
    return microbatches.reshape(-1, microbatches.shape[-1])


def by_hand(loss, params, xs, ys):
    def run(microbatch):
        return jax.value_and_grad(loss)(params, *microbatch)

    return mpmd.treduce(run, (xs, ys), SCHEDULE, operation=mpmd.Add)


def as_one_batch(loss, params, xs, ys, **options):
    differentiate = mpmd.value_and_grad(loss, num_microbatches=4, schedule=SCHEDULE, **options)
    return differentiate(params, *map(rows_of, (xs, ys)))


def with_reduced_rows(loss, *arguments):
    return as_one_batch(loss, *arguments, has_aux=True, aux_reduction=mpmd.Concat())


def forward_only(loss, params, xs, ys):
    schedule = mpmd.ForwardOnly(num_stages=2, mpmd_dim=2)
    value = mpmd.treduce(lambda mb: loss(params, *mb), (xs, ys), schedule, operation=mpmd.Add)
    return value, jax.tree.map(jnp.zeros_like, params)


MARKED = {"mark": mpmd.mark_stage_end}
LOSSES = {
    "jax.grad with marks": (by_hand, MARKED),
    "value_and_grad with marks": (as_one_batch, MARKED),
    "value_and_grad without marks": (as_one_batch, {}),
    "ForwardOnly with marks": (forward_only, MARKED),
    "rows with an operation": (with_reduced_rows, {**MARKED, "returns": lambda loss, h: (loss, h)}),
}


def trained(gradients, loss):
    def step(params, xs, ys):
        value, grads = gradients(loss, params, xs, ys)
        return descend(params, grads), value

    return step


@pytest.mark.parametrize(("gradients", "options"), LOSSES.values(), ids=LOSSES)
def test_a_compile_calls_the_loss_once(gradients, options):
    loss = Counted(**options)
    planned(trained(gradients, loss), weights(2), *batch())
    assert loss.calls == 1


def test_state_of_weak_types_calls_the_loss_again_with_the_types_of_the_second_step():
    loss = Counted(**MARKED)
    params = [{name: jnp.full(leaf.shape, 0.1) for name, leaf in layer.items()} for layer in weights(2)]
    assert all(leaf.weak_type for leaf in jax.tree.leaves(params))
    lowered = planned(trained(by_hand, loss), params, *batch())
    assert loss.calls == 2
    assert not any(leaf.weak_type for leaf in lowered.compiled.step.argument_leaves)


def test_a_plan_calls_the_loss_once_and_once_for_each_simulated_candidate():
    loss = Counted()

    def step(params, x, y):
        value, grads = mpmd.value_and_grad(loss)(params, x, y)
        return descend(params, grads), value

    x, y = map(rows_of, batch())
    mpmd.plan(step, weights(2), x, y, cluster=CLUSTER, groups=2, submesh={}, simulate=2)
    assert loss.calls == 3
