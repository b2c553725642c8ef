"""State that is made where a step reads it: the bits of ``jax.jit``, in the right place, or an error."""

import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.arguments.signature import CallSignature
from mpmd.step.initialize import compile_init
from tests.support.models import batch, init, make_step, mse, sgd_step, weights
from tests.support.parity import assert_replicas_equal, compiles, mesh_of, raw, uneven_mesh_of
from tests.support.plans import sent_values
from tests.support.tied import (
    GROUPS,
    TOKENS,
    WIDTH,
    batch_shapes,
    init_fn,
    state_shapes,
    tokens,
    train_step,
)


def specs():
    return jax.tree.map(lambda leaf: P(None, "data") if len(leaf.shape) == 2 else P(), state_shapes())


def compiled_on(mesh, sharded):
    in_specs = (specs(), P(), P()) if sharded else None
    step = mpmd.jit(train_step, mesh, in_specs=in_specs, donate_argnums=0)
    return step.compile(state_shapes(), *batch_shapes())


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(GROUPS) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(mesh):
    """The step on groups of one device each. Tests leave it usable."""
    return compiled_on(mesh, sharded=False)


def assert_bits_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, left), right in pairs:
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        assert raw(left).tobytes() == raw(right).tobytes(), jax.tree_util.keystr(path)


def assert_placed(state, step):
    for leaf, read in zip(jax.tree.leaves(state), jax.tree.leaves(step.argument_leaves()), strict=True):
        assert (leaf.mpmd_idxs, leaf.placement.spec) == (read.mpmd_idxs, read.spec), read.path


@pytest.mark.usual("uneven")
@pytest.mark.parametrize(
    "of_groups",
    [lambda: uneven_mesh_of({"data": 2}, {"data": 4}, {"data": 1}), lambda: mesh_of(4)],
    ids=["uneven", "a spare group"],
)
def test_the_state_has_the_bits_of_jit_and_is_where_the_step_reads_it(of_groups):
    with of_groups() as mesh:
        step = compiled_on(mesh, sharded="data" in mesh.unstack[0].axis_names)
        state = step.init(init_fn, jax.random.key(3))
        assert_bits_equal(state, jax.jit(init_fn)(jax.random.key(3)))
        assert_placed(state, step)
        assert_replicas_equal(state)
        assert state["params"]["embedding"].mpmd_idxs == (0, 2)
        batch = tokens()
        with compiles() as counted:
            state, loss = step(state, *batch)
            assert np.isfinite(float(loss))
        assert not counted, "the first step moves or compiles something"
        assert_placed(state, step)


def programs_held(mesh):
    """How many programs each group has, after all that it was asked before."""
    gc.collect()
    asked = [group.submit(lambda group=group: len(group.worker._programs)) for group in mesh.runtime._groups]
    return [future.result() for future in asked]


def test_the_same_function_is_compiled_once_and_dropped_with_its_user(mesh, step):
    def make(key, *unused):
        return init_fn(key)

    before = programs_held(mesh)
    first = step.init(make, jax.random.key(3))
    with compiles() as counted:
        assert_bits_equal(step.init(make, jax.random.key(3)), first)
    assert not counted
    with compiles() as counted:
        assert_bits_equal(step.init(make, jax.random.key(3), 1.5), first)
    assert counted
    made = weakref.ref(make)
    del make
    assert programs_held(mesh) == before
    assert made() is None


def draws(compiled):
    """The groups that draw an embedding's random numbers."""
    return [
        group
        for (group, _), jaxpr in compiled.program.jaxprs.items()
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "random_bits" and eqn.outvars[0].aval.shape == (TOKENS, WIDTH)
    ]


def test_what_several_groups_want_is_drawn_once_and_each_group_makes_its_share(mesh, step):
    call = CallSignature.of(init_fn).bind((jax.random.key(0),), {})
    compiled = compile_init(init_fn, call, step.argument_leaves(), mesh)
    assert draws(compiled) == [0]
    plan = compiled.program.plan
    sizes = [math.prod(aval.shape) for aval in sent_values(plan)]
    key_numbers = 2  # a release of JAX sends a key as one typed value, another one its two numbers
    assert [size for size in sizes if size > key_numbers] == [TOKENS * WIDTH]
    layer = 3 * 4 * (WIDTH * WIDTH + WIDTH)  # with two moments
    embedding = 4 * TOKENS * WIDTH
    peaks = compiled.verified.live_bytes
    for peak, share in zip(peaks, [layer + 3 * embedding, layer, layer + embedding], strict=True):
        assert share <= peak < share + 100, "a group holds more than its share"


def test_arguments_may_become_parts_of_the_state(step):
    """As loaded weights do; the optimizer's state is made of their shapes."""
    made = jax.jit(init_fn)(jax.random.key(1))

    def around(params, key):
        return {**init_fn(key), "params": params, "key": key}

    state = step.init(around, jax.device_get(made["params"]), made["key"])
    assert_placed(state, step)
    expected = {**made, "optimizer": init_fn(jax.random.key(0))["optimizer"]}
    assert_bits_equal(state, expected)
    again = step.init(lambda state: jax.tree.map(lambda leaf: leaf, state), state)
    assert_placed(again, step)
    assert_bits_equal(again, expected)


def test_any_argument():
    def step(xs, state, ys):
        return sgd_step(mse, mpmd.Std1F1B(2))(state, xs, ys)[::-1]

    with mesh_of(2) as mesh:
        xs, ys = batch()
        compiled = mpmd.jit(step, mesh).compile(xs, weights(2), ys)
        with pytest.raises(
            ValueError, match=r"there is no argument argnum=-1; the step was compiled for 0, 1, 2"
        ):
            compiled.init(lambda: weights(2), argnum=-1)
        state = compiled.init(lambda: weights(2), argnum=1)
        assert_bits_equal(state, jax.jit(lambda: weights(2))())
        by_name = mpmd.jit(step, mesh).compile(xs=xs, ys=ys, state=weights(2))
        assert_bits_equal(by_name.init(lambda: weights(2), argnum="state"), state)
        loss, _ = compiled(xs, state, ys)
        assert np.isfinite(float(loss))


def test_what_the_step_does_not_read_is_on_group_0():
    def step(state, xs, ys):
        params, loss = sgd_step(mse, mpmd.Std1F1B(2))(state["params"], xs, ys)
        return {**state, "params": params, "unread": jnp.zeros(3)}, loss

    def init():
        return {"params": weights(2), "unread": jnp.ones(3), "kept": jnp.ones(2)}

    with mesh_of(2) as mesh:
        compiled = mpmd.jit(step, mesh).compile(jax.eval_shape(init), *batch())
        state = compiled.init(init)
        assert state["unread"].mpmd_idxs == (0,)
        assert_placed(state, compiled)
        assert_bits_equal(compiled(state, *batch())[0]["kept"], jnp.ones(2))


def wrong(change):
    def init(key):
        state = init_fn(key)
        return change(state)

    return init


REFUSED = {
    "a shape": (
        lambda s: {**s, "params": {**s["params"], "embedding": jnp.zeros((WIDTH, TOKENS))}},
        r"reads args\[0\]\['params'\]\['embedding'\] as \S*\[16, 8\], but the function makes \S*\[8, 16\]",
    ),
    "a dtype": (
        lambda s: {**s, "params": {**s["params"], "temperature": jnp.int32(1)}},
        r"reads args\[0\]\['params'\]\['temperature'\] as float32\[\], but the function makes int32\[\]",
    ),
    "a leaf too few": (
        lambda s: {"params": s["params"], "optimizer": s["optimizer"]},
        r"reads args\[0\]\['key'\], but the function makes no result\['key'\]",
    ),
    "a leaf too many": (lambda s: {**s, "step": 0}, r"the step has no place for result\['step'\]"),
    "another structure": (
        lambda s: {**s, "params": {**s["params"], "layers": tuple(s["params"]["layers"])}},
        r"reads an argument of the structure",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_another_state_than_the_step_reads_is_refused(step, change, message):
    with pytest.raises(mpmd.CompileError, match=message):
        step.init(wrong(change), jax.random.key(0))


def test_a_function_with_a_loop_is_refused(step):
    def init(key):
        state, _ = train_step(init_fn(key), *tokens())
        return state

    with pytest.raises(mpmd.CompileError, match="has a treduce"):
        step.init(init, jax.random.key(0))


def test_a_static_argument_cannot_be_made():
    def step(state, xs, ys, power):
        return make_step(mse, mpmd.Std1F1B(2))(state, xs, ys)

    with mesh_of(2) as mesh:
        compiled = mpmd.jit(step, mesh, static_argnums=3).compile(init(weights(2)), *batch(), 2)
        with pytest.raises(ValueError, match="argument 3 is static"):
            compiled.init(functools.partial(weights, 2), argnum=3)


@pytest.mark.slow
def test_a_model_that_marks_its_stages_may_be_called_for_its_shapes(step):
    """The marks are dead code, of which nothing is to be said."""

    def init(key):
        state = init_fn(key)
        jax.eval_shape(train_step, state, *tokens())
        mpmd.mark_stage_end(state["params"]["embedding"] * 2)
        return state

    assert_bits_equal(step.init(init, jax.random.key(0)), jax.jit(init)(jax.random.key(0)))


def test_a_result_that_is_an_argument_has_the_spec_that_is_asked_for():
    """And so has each of two results that are the same value."""
    x = jnp.arange(8.0)
    with mesh_of(2, model=2) as mesh:
        specs = (P("model"), P(), P("model"), P())
        step = mpmd.jit(lambda x: (x, x, 2 * x, 2 * x), mesh, out_specs=specs)
        results = step(x)
        assert [result.spec for result in results] == list(specs)
        for result, expected in zip(results, (x, x, 2 * x, 2 * x), strict=True):
            np.testing.assert_array_equal(result, expected)
