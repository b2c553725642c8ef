"""The table of a step's layers, against numbers by hand."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import mpmd
from mpmd.errors import StepWarning
from mpmd.planner.profiling import profile_of, profile_step
from tests.support.divided_models import state_of, step_of
from tests.support.programs import PROGRAMS

ROWS, MICROBATCHES, WIDTH, HIDDEN = 4, 3, 8, 32
FLOAT = 4


def batch(*shape):
    return jax.ShapeDtypeStruct((MICROBATCHES, ROWS, *shape), jnp.float32)


def two_layers(params, x):
    """Two products, with nothing between the second and the loss that keeps anything."""
    x = mpmd.mark_stage_end(x @ params["in"])
    return (x @ params["out"]).sum()


def reduced(loss, params, x):
    """The loss and gradients of all microbatches."""
    return mpmd.treduce(
        lambda x: jax.value_and_grad(loss)(params, x), x, schedule=mpmd.Std1F1B(2), operation=mpmd.Add
    )


def shapes():
    return {"in": jnp.ones((WIDTH, HIDDEN)), "out": jnp.ones((HIDDEN, WIDTH))}


def test_counts_what_each_layer_has():
    profile = profile_of(step_of(two_layers, 2), (state_of(shapes), batch(WIDTH)), {})
    first, last = profile.layers
    weight, between = WIDTH * HIDDEN * FLOAT, ROWS * HIDDEN * FLOAT
    product = 2 * ROWS * WIDTH * HIDDEN
    assert (first.weights, first.gradients, first.state) == (weight, weight, weight)
    assert (last.weights, last.gradients, last.state) == (weight, weight + FLOAT, weight)
    assert (first.entering, last.entering) == (0, between)
    assert (first.residuals, last.residuals) == (0, between), "the batch is there anyway"
    assert first.forward.operations == pytest.approx(product, rel=0.1)
    assert last.backward.operations == pytest.approx(2 * product, rel=0.2)
    assert first.backward.operations == pytest.approx(product, rel=0.4), "no gradient of the batch"
    taken = ROWS * WIDTH * FLOAT
    assert first.forward.nbytes == 3 * taken + between, "the microbatch is cut out, then multiplied"
    assert profile.batch == MICROBATCHES * ROWS * WIDTH * FLOAT
    assert (profile.rows, profile.microbatch_rows) == (MICROBATCHES * ROWS, ROWS)
    assert profile.num_microbatches == MICROBATCHES
    assert profile.are_stages and profile.has_backward
    assert profile.skips == profile.tied == ()
    assert profile.outside.nbytes >= 2 * (2 + 3) * weight, "reads weights, moments, gradients; writes two"


def test_values_that_go_past_layers():
    def loss(params, x):
        first = x @ params["in"]
        second = mpmd.mark_stage_end(first) @ params["out"]
        third = jnp.sin(mpmd.mark_stage_end(second)) @ params["in"]
        return jnp.square(third + first).sum()

    profile = profile_of(step_of(loss, 3), (state_of(shapes), batch(WIDTH)), {})
    assert profile.skips == ((0, 2, ROWS * HIDDEN * FLOAT),)
    assert [layer.entering for layer in profile.layers] == [0, ROWS * HIDDEN * FLOAT, ROWS * WIDTH * FLOAT]
    assert profile.tied == (((0, 2), WIDTH * HIDDEN * FLOAT),)


def test_frozen_weights_have_no_gradients():
    def step(params, frozen, x):
        loss, grads = reduced(lambda p, x: two_layers({"in": p, "out": frozen}, x), params, x)
        return params - grads, loss

    args = jnp.ones((WIDTH, HIDDEN)), jnp.ones((HIDDEN, WIDTH)), batch(WIDTH)
    first, last = profile_of(step, args, {}).layers
    assert (last.weights, last.gradients, last.state) == (WIDTH * HIDDEN * FLOAT, FLOAT, 0)
    assert (first.gradients, first.state) == (WIDTH * HIDDEN * FLOAT, 0)


def test_moments_belong_to_their_layers_when_gradients_are_clipped_by_their_norm():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(params, kept, x):
        loss, grads = reduced(two_layers, params, x)
        updates, kept = optimizer.update(grads, kept, params)
        return optax.apply_updates(params, updates), kept, loss

    params = jax.eval_shape(shapes)
    profile = profile_of(step, (params, jax.eval_shape(optimizer.init, params), batch(WIDTH)), {})
    assert [layer.state for layer in profile.layers] == [2 * WIDTH * HIDDEN * FLOAT] * 2


def test_weights_that_are_cast_before_the_loop():
    def step(params, x):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        loss, grads = reduced(lambda p, x: two_layers(p, x.astype(jnp.bfloat16)), half, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    profile = profile_of(step, (jax.eval_shape(shapes), batch(WIDTH)), {})
    assert [layer.weights for layer in profile.layers] == [WIDTH * HIDDEN * FLOAT] * 2
    assert [layer.gradients for layer in profile.layers] == [WIDTH * HIDDEN * 2, WIDTH * HIDDEN * 2 + 2]
    assert profile.specs["model"]


def test_forwards_alone():
    def step(params, x):
        return mpmd.treduce(
            lambda x: two_layers(params, x), x, schedule=mpmd.ForwardOnly.of_size(2, 2), operation=mpmd.Add
        )

    profile = profile_of(step, (jax.eval_shape(shapes), batch(WIDTH)), {})
    assert not profile.has_backward
    assert all(layer.backward.operations == layer.residuals == layer.state == 0 for layer in profile.layers)
    assert [layer.weights for layer in profile.layers] == [WIDTH * HIDDEN * FLOAT] * 2


def test_iterations_of_a_loop_within_a_layer():
    """Each iteration's work counts, and its weights cannot be divided by iterations."""

    def loss(params, x):
        def iteration(x, w):
            return jnp.tanh(x @ w), None

        x = mpmd.mark_stage_end(x @ params["in"])
        x, _ = jax.lax.scan(iteration, x, params["inner"])
        return (x @ params["out"]).sum()

    def init():
        return {**shapes(), "inner": jnp.ones((5, HIDDEN, HIDDEN))}

    profile = profile_of(step_of(loss, 2), (state_of(init), batch(WIDTH)), {})
    last = profile.layers[1]
    products = 2 * ROWS * HIDDEN * (5 * HIDDEN + WIDTH)
    assert last.forward.operations == pytest.approx(products, rel=0.1)
    assert last.residuals >= 5 * ROWS * HIDDEN * FLOAT
    dims = profile.specs["model"].values()
    assert dims and 0 in dims and "inner" not in [path for path, dim in _paths(profile, init) if dim == 0]


def _paths(profile, init):
    leaves = jax.tree_util.tree_leaves_with_path((state_of(init),))
    return [(leaves[i][0][-1].key, dim) for i, dim in profile.specs["model"].items() if i < len(leaves)]


@pytest.mark.parametrize(
    ("fun", "for_each_element"),
    [
        (jax.grad(lambda x: jax.lax.conv(x, jnp.ones((4, 4, 2, 2)), (2, 2), "VALID").sum()), 2 * 4),
        (lambda x: (1j * x) @ (1j * x), 8 * 32),
        (lambda x: jax.lax.cond(x.any(), lambda: x @ x, lambda: jnp.sin(jnp.cos(-abs(x)))), 2 * 32),
    ],
)
def test_operations(fun, for_each_element):
    profile = profile_of(fun, (x := jnp.ones((1, 4, 32, 32)),), {})
    assert profile.layers[0].forward.operations == pytest.approx(for_each_element * x.size, rel=0.1)


OF_PROGRAMS = [pytest.param(program, id=program.name, marks=pytest.mark.slow) for program in PROGRAMS]


@pytest.mark.parametrize("program", OF_PROGRAMS)
def test_knows_all_kinds_of_steps(program):
    if program.name.startswith("mixture_of_experts_on_a_mesh_of_its_own"):
        pytest.skip("a mesh of the user's own leaves no sizes of submeshes to choose")
    case = program.case()
    args = jax.tree.map(jnp.asarray, (case.state, *case.batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StepWarning)  # some programs get them when they are compiled
        profiles = profile_step(case.step, args, {}).profiles
    for layer in itertools.chain.from_iterable(profile.layers for profile in profiles):
        assert layer.forward.operations >= 0 and layer.forward.nbytes >= 0
        for division in layer.divisions.values():
            shares = division.operations, division.weights, division.activations
            assert all(0 <= share <= 1 for share in shares)
            assert division.largest > 1
