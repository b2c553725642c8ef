"""Loops of an optimizer over all weights at once become a loop for each group."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpmd
from tests.support.models import batch, descend, keys, layer, planned, squares
from tests.support.parity import assert_parity, mesh_of

WIDTH, LAYERS = 4, 4


def weights():
    return [
        {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 2, "b": jnp.full(WIDTH, 0.1), "gain": jnp.float32(1)}
        for key in keys(LAYERS)
    ]


def loss(params, x, y):
    for i, stage in enumerate(params):
        x = stage["gain"] * layer(stage, x)
        if i == 1:
            x = mpmd.mark_stage_end(x)
    return squares(x, y)


def train(update):
    """A train step of two stages on two groups; ``update(params, grads, count)`` gives the new weights."""

    def step(params, xs, ys, count):
        total, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss)(params, *mb), (xs, ys), mpmd.Std1F1B(2), operation=mpmd.Mean
        )
        return update(params, grads, count), total

    return step


def smaller(tree):
    """Each array by itself: of a matrix, a step of a Newton-Schulz iteration."""
    return jax.tree.map(lambda a: 1.4 * a - 0.4 * a @ a.T @ a if a.ndim == 2 else 0.9 * a, tree)


def sum_of_squares(tree):
    return sum(jnp.sum(a * a) for a in jax.tree.leaves(tree))


def scan_over_coefficients(params, grads, count):
    def body(grads, pair):
        return jax.tree.map(lambda a, b: pair[0] * a + pair[1] * b, grads, smaller(grads)), None

    pairs = jnp.array([[0.5, 0.4], [0.6, 0.3], [0.7, 0.2], [0.8, 0.1]])
    return lax.scan(body, grads, pairs, reverse=True, unroll=2, _split_transpose=True)[0]


def while_with_a_counter(params, grads, count):
    """The weights are carried as they are."""

    def body(carry):
        i, grads, weights = carry
        return i + 1, jax.tree.map(lambda g, w: g + 0.01 * w, smaller(grads), weights), weights

    return lax.while_loop(lambda c: c[0] < count, body, (0, grads, params))[1]


def loop_within_a_branch(params, grads, count):
    return lax.cond(count > 1, lambda g: lax.fori_loop(0, count, lambda i, g: smaller(g), g), smaller, grads)


def jitted_with_an_unread_norm(params, grads, count):
    """The norm of all weights would join the groups, but nothing reads it."""

    @jax.jit
    def iterate(grads):
        def body(carry):
            i, grads, _ = carry
            return i + 1, smaller(grads), sum_of_squares(grads)

        return lax.while_loop(lambda c: c[0] < count, body, (0, grads, 0.0))

    return iterate(grads)[1]


def map_over_a_stack_for_each_group(params, grads, count):
    stacks = [jnp.stack([g["w"] for g in grads[i : i + 2]]) for i in (0, 2)]
    mapped = [matrix for stack in lax.map(smaller, stacks) for matrix in stack]
    return [{**g, "w": matrix} for g, matrix in zip(grads, mapped, strict=True)]


def noise_of_a_carried_key(params, grads, count):
    def body(i, carry):
        key, grads = carry
        key, *drawn = jax.random.split(key, 1 + LAYERS)
        noisy = [
            {**g, "w": g["w"] + 0.01 * jax.random.normal(k, (WIDTH, WIDTH))}
            for g, k in zip(grads, drawn, strict=True)
        ]
        return key, noisy

    return lax.fori_loop(0, 2, body, (jax.random.key(1), grads))[1]


FORMS = (
    scan_over_coefficients,
    while_with_a_counter,
    loop_within_a_branch,
    jitted_with_an_unread_norm,
    map_over_a_stack_for_each_group,
    noise_of_a_carried_key,
)


def sent(plan):
    """The messages of a plan: the shapes of the values of each, by its groups."""
    avals = plan.avals()
    return [
        (program.mpmd_idx, step.dst, [str(avals[name]) for name in step.values])
        for program in plan.programs
        for step in program.instructions
        if type(step).__name__ == "Send"
    ]


def plan_of(update):
    return planned(train(update), weights(), *batch(), jnp.int32(2), donate_argnums=0).plan


@pytest.fixture(scope="module")
def sent_by_microbatches():
    return sent(plan_of(lambda params, grads, count: descend(params, grads)))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_each_group_loops_over_its_own_weights(form, sent_by_microbatches):
    plan = plan_of(lambda params, grads, count: descend(params, form(params, grads, count)))
    assert sent(plan) == sent_by_microbatches
    for leaf in plan.outputs[:-1]:
        layer_number = int(leaf.path[4])
        assert leaf.mpmd_idxs == (layer_number // 2,), f"{leaf.path} is on {leaf.mpmd_idxs}"


@pytest.mark.slow
def test_parity():
    """All of them, one after the other."""

    def update(params, grads, count):
        for form in FORMS:
            grads = form(params, grads, count)
        return descend(params, grads)

    assert_parity(train(update), weights(), *batch(), jnp.int32(2), mesh=mesh_of(2), donate_argnums=0)
