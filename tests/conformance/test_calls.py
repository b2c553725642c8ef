"""How steps are called: signatures, donation, counters, new shapes; what is compiled and when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from tests.support.models import WIDTH, batch, mlp, shrink, weights
from tests.support.parity import assert_close, compiles, copied
from tests.support.programs.table import loop

pytestmark = pytest.mark.usefixtures("quick_compiles")


# Signatures.


def state_last(xs, ys, state, /):
    new, total = shrink(state, xs, ys)
    return total, new


class Trainer:
    rate = 0.1

    def step(self, state, xs, ys):
        return shrink(state, xs, ys, self.rate)


def arguments():
    return weights(2), *batch()


def wide(leaf):
    return np.asarray(leaf, np.float64)


CALLS = {
    "some by name": (shrink, lambda: (arguments()[:1], {"ys": batch()[1], "xs": batch()[0]})),
    "state last": (state_last, lambda: ((*batch(), weights(2)), {})),
    "method": (Trainer().step, lambda: (arguments(), {})),
    "partial of the state": (functools.partial(shrink, weights(2)), lambda: (batch(), {})),
    "jitted": (jax.jit(shrink), lambda: (arguments(), {})),
    "numpy of 64 bits": (shrink, lambda: (jax.tree.map(wide, arguments()), {})),
    "unused arguments": (
        lambda s, xs, ys, a, b: shrink(s, xs, ys),
        lambda: ((*arguments(), 0, {"b": 1}), {}),
    ),
}


@pytest.mark.usual("some by name", "method", "partial of the state", "jitted", "unused arguments")
@pytest.mark.parametrize(("fun", "call"), CALLS.values(), ids=CALLS)
def test_signatures(mesh, fun, call):
    args, kwargs = call()
    expected = jax.jit(fun)(*args, **kwargs)
    compiled = mpmd.jit(fun, mesh)
    assert_close(compiled(*args, **kwargs), expected)
    assert_close(compiled.compile(*args, **kwargs)(*args, **kwargs), expected)


@pytest.mark.parametrize(
    "options",
    [{"static_argnames": ("power", "extra")}, {"static_argnums": (-2, -1)}],
    ids=str,
)
def test_static_arguments(mesh, options):
    def step(state, xs, ys, power, extra):
        def loss(params, x, y):
            return jnp.mean(jnp.abs(mlp(params, x) - y) ** power) * (2 if extra == "double" else 1)

        return state, loop(lambda x, y: loss(state, x, y), (xs, ys), 2)

    compiled = mpmd.jit(step, mesh, **options)
    for extra in ("double", "single", "double"):
        expected = jax.jit(step, static_argnums=(3, 4))(*arguments(), 2, extra)
        with compiles() as counted:
            assert_close(compiled(*arguments(), 2, extra), expected)
    assert not counted, "the same static arguments compile again"


def test_equal_static_arguments_of_other_types_are_others(mesh):
    """As under ``jax.jit``: the dtype of a product with 2 is another than with 2.0."""
    step = mpmd.jit(lambda x, factor: x * factor, mesh, static_argnames="factor")
    integers = jnp.arange(4)
    for factor in (2, 2.0, True, 1, np.float16(2)):
        assert step(integers, factor).dtype == (integers * factor).dtype
    with pytest.raises(ValueError, match=r"was compiled for the static arguments \(\(1, 2\),\), not .*2.0"):
        step.compile(integers, 2)(integers, 2.0)


@pytest.mark.parametrize(
    "convert", [lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), np.asarray], ids=["shapes", "numpy"]
)
def test_compiled_ahead_of_the_call(mesh, convert):
    step = mpmd.jit(shrink, mesh)
    loaded = step.compile(*jax.tree.map(convert, arguments()))
    expected = jax.jit(shrink)(*arguments())
    with compiles() as counted:
        state, total = loaded(*arguments())
        jax.block_until_ready(float(total))
        assert step.compile(state, *batch()) is loaded
    assert not counted, "the call compiles what was compiled"
    assert_close((state, total), expected)


# Compiling once.


@pytest.mark.parametrize("start", [0, jnp.zeros(())], ids=repr)
def test_a_step_counter_compiles_nothing_after_the_first_step(mesh, start):
    """Neither does a number of Python that differs in each step."""

    def step(state, xs, ys, rate):
        params, count = state
        params, total = shrink(params, xs, ys, rate / (1 + count))
        return (params, count + 1), (total, count)

    compiled = mpmd.jit(step, mesh)
    state, (total, _) = compiled((weights(2), start), *batch(), 0.1)
    float(total)
    with compiles() as counted:
        for number in range(1, 4):
            state, (total, count) = compiled(state, *batch(), 0.1 / number)
            float(total)
    assert not counted, f"{len(counted)} compiles after the first step"
    assert int(count) == 3


# Donation.


@pytest.mark.parametrize("donated", [0, (0, 1, 2)], ids=str)
def test_donated_arguments_are_dead_afterwards(mesh, donated):
    step = mpmd.jit(shrink, mesh, donate_argnums=donated)
    expected = jax.jit(shrink)(jax.jit(shrink)(*arguments())[0], *batch())
    state, xs, ys = map(copied, arguments())
    first, _ = step(state, xs, ys)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert xs.is_deleted() == ys.is_deleted() == (donated == (0, 1, 2))
    second = step(first, *batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert_close(second, expected)
    with pytest.raises(ValueError, match=r"^args\[0\] was deleted or donated to an earlier call"):
        step(first, *batch())


@pytest.mark.parametrize("by_name", [(), ("xs", "ys")], ids=str)
def test_the_last_donated_however_it_is_passed(mesh, by_name):
    step = mpmd.jit(shrink, mesh, donate_argnums=-1)
    given = dict(zip(("state", "xs", "ys"), map(copied, arguments()), strict=True))
    named = {name: given[name] for name in by_name}
    result = step(*(value for name, value in given.items() if name not in by_name), **named)
    assert_close(result, jax.jit(shrink)(*arguments()))
    dead = [name for name, value in given.items() if jax.tree.leaves(value)[0].is_deleted()]
    assert dead == ["ys"]


def test_a_result_survives_the_donation_of_the_state_that_it_is_part_of(mesh):
    def step(state, xs, ys):
        params, counts = state
        new, total = shrink(params, xs, ys)
        counts += 1
        return (new, counts), (total, counts)

    compiled = mpmd.jit(step, mesh, donate_argnums=0)
    first, (_, kept) = compiled((weights(2), jnp.arange(100.0)), *batch())
    jax.block_until_ready(compiled(first, *batch()))
    assert first[1].is_deleted()
    np.testing.assert_array_equal(mpmd.to_host(kept), np.arange(1, 101))


def test_the_same_array_twice(mesh):
    shared = jnp.eye(WIDTH)
    params = [{"w": shared, "b": jnp.zeros(WIDTH)}, {"w": shared, "b": jnp.ones(WIDTH)}]
    expected = jax.jit(shrink)(params, *batch())
    assert_close(mpmd.jit(shrink, mesh)(params, *batch()), expected)
    donating = mpmd.jit(shrink, mesh, donate_argnums=0)
    said = (
        r"args\[0\]\[0\]\['w'\] and args\[0\]\[1\]\['w'\] are the same array and it is donated; pass a copy"
    )
    with pytest.raises(ValueError, match=said):
        donating(params, *batch())
    assert not shared.is_deleted()
    state, _ = mpmd.jit(shrink, mesh)(params, *batch())
    with pytest.raises(ValueError, match="are the same array and it is donated"):
        donating([state[0], state[0]], *batch())


# Other arguments on a later call.


def test_new_shapes_dtypes_and_trees_compile_anew(mesh):
    step = mpmd.jit(shrink, mesh)
    state, (xs, ys) = weights(2), batch()
    more = [
        (state, xs, ys),
        (state, xs[:2], ys[:2]),
        (state, jnp.bfloat16(xs), ys),
        (tuple(state), xs, ys),
        (state, xs, ys, 0.3),
    ]
    for _ in range(2):
        for args in more:
            assert_close(step(*args), jax.jit(shrink)(*args))


def test_a_loaded_step_names_the_leaves_that_differ(mesh):
    loaded = mpmd.jit(shrink, mesh).compile(*arguments())
    state, (xs, ys) = weights(2), batch()
    with pytest.raises(
        ValueError, match=r"args\[1\] is float32\[2, 4, 4\], not float32\[4, 4, 4\]; args\[2\]"
    ):
        loaded(state, xs[:2], ys[:2])
    with pytest.raises(ValueError, match=r"args\[0\]\[1\]\['w'\] is bfloat16"):
        loaded([state[0], {**state[1], "w": jnp.bfloat16(state[1]["w"])}], xs, ys)
    with pytest.raises(ValueError, match="another structure") as caught:
        loaded(state[:1], xs, ys)
    assert len(str(caught.value)) < 1000
    said = r"another structure.*: the call lacks args\[1\] and has args\[1\]\[0\], "
    with pytest.raises(ValueError, match=said):
        loaded(state, list(xs), ys)
