"""Steps with loops under ``jax.vmap``: populations of models, seeds and rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.explicit import draws
from tests.support.models import FromZeros
from tests.support.parity import assert_like_jit, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

MEMBERS, WIDTH, ROWS = 3, 4, 8


PARAMS = [draws(MEMBERS, WIDTH, WIDTH, seed=seed) for seed in range(2)]
X = draws(MEMBERS, ROWS, WIDTH, seed=2)


def model(params, x):
    return mpmd.mark_stage_end(jnp.tanh(x @ params[0])) @ params[1]


def loss_fn(params, x):
    return jnp.mean(model(params, x) ** 2)


def differentiate(params, x, loss=loss_fn):
    return mpmd.value_and_grad(loss, num_microbatches=4, schedule=mpmd.Std1F1B(2))(params, x)


def train(params, x, rate=0.1):
    loss, grads = differentiate(params, x)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss


class Decayed(FromZeros):
    def update(self, state, update, index):
        return 0.5 * state + index * update


def operations(params, x):
    def of_microbatch(x):
        y = model(params, x)
        return y, y, jnp.mean(y), jnp.max(y), jnp.sum(y, 0)

    each = (mpmd.Concat(1), mpmd.Concat(-1), mpmd.Mean, mpmd.Max, Decayed())
    return mpmd.treduce(of_microbatch, mpmd.microbatches(x, 4), mpmd.ForwardOnly(2, 2), operation=each)


def carried(params, x):
    def of_microbatch(average, x):
        average = 0.9 * average + 0.1 * jnp.mean(x @ params[0], 0)
        return average, jax.value_and_grad(lambda p: loss_fn(p, x - average))(params)

    mean = (mpmd.Mean, mpmd.Mean)
    return mpmd.treduce(
        of_microbatch, mpmd.microbatches(x, 4), mpmd.Std1F1B(2), operation=mean, carry=jnp.zeros(WIDTH)
    )


def seen_by_others(params, x):
    def loss(params, x):
        others = jax.lax.psum(jnp.sum(params[0]), "member")
        return loss_fn(params, x) * others + jax.lax.axis_index("member")

    loss, grads = differentiate(params, x, loss)
    return jax.lax.pmean(loss, "member"), grads


def scanned(stacked, x):
    def loss(stacked, x):
        def body(h, w):
            return mpmd.mark_stage_end(jnp.tanh(h @ w), num_stages=2), None

        return jnp.mean(jax.lax.scan(body, x, stacked)[0] ** 2)

    loss, grads = differentiate(stacked, x, loss)
    return stacked - 0.1 * grads, loss


def of_layers(params, x):
    return scanned(jnp.stack(params), x)


ONE = [leaf[0] for leaf in PARAMS]
RATES = np.float32([0.1, 0.2, 0.3])
STEPS = {
    "rates": (jax.vmap(train, in_axes=(None, None, 0)), ONE, X[0], RATES),
    "an axis in between": (
        jax.vmap(train, in_axes=(1, 1)),
        [np.moveaxis(p, 0, 1) for p in PARAMS],
        np.moveaxis(X, 0, 1),
    ),
    "nested": (jax.vmap(jax.vmap(train, in_axes=(0, None)), in_axes=(None, 0)), PARAMS, X),
    "operations": (jax.vmap(operations), PARAMS, X),
    "a carry": (jax.vmap(carried, in_axes=(0, None)), PARAMS, X[0]),
    "an axis name": (jax.vmap(seen_by_others, in_axes=(0, None), axis_name="member"), PARAMS, X[0]),
    "layers in a scan": (jax.vmap(of_layers, in_axes=(0, None)), PARAMS, X[0]),
}


@pytest.mark.usual("operations", "a carry", "layers in a scan")
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_a_population_computes_the_numbers_of_plain_jax(mesh, case):
    step, *args = case
    assert_like_jit(mesh, step, *args)


def test_each_group_has_its_stage_of_all_members(mesh):
    step = mpmd.jit(jax.vmap(train, in_axes=(0, None)), mesh).compile(PARAMS, X[0])
    (first, second), _ = step(PARAMS, X[0])
    assert first.mpmd_idxs == (0,) and second.mpmd_idxs == (1,)
    assert not mpmd.explain(step).findings  # each group runs its backwards
    stacked = jax.vmap(scanned, in_axes=(0, None))
    ranges = mpmd.jit(stacked, mesh).lower(jnp.stack(PARAMS, 1), X[0]).plan.inputs
    assert [leaf.path for leaf in ranges[:2]] == ["args[0][:, 0:1]", "args[0][:, 1:2]"]


@pytest.mark.parametrize("name", [None, "data"])
def test_members_on_the_devices_of_a_group(name):
    params = [jnp.concatenate([leaf, leaf[:1]]) for leaf in PARAMS]
    step = jax.vmap(train, in_axes=(0, None), spmd_axis_name=name)
    with mesh_of(2, data=2) as mesh:
        assert_like_jit(mesh, step, params, X[0], in_shardings=([P("data")] * 2, None))
