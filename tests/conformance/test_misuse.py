"""What is not a step, a mesh or an argument is refused at once, with what to write instead."""

import functools
import operator
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import batch, init, make_step, mse, planned, sgd_step, weights
from tests.support.parity import assert_close, mesh_of

STEP = make_step(mse, mpmd.Std1F1B(2))


@functools.cache
def start():
    return init(weights(2))


def compiled(step=STEP, **options):
    return mpmd.jit(step, mesh_of(2), **options)


@pytest.mark.parametrize("passed", [True, False], ids=["passed", "closed over"])
def test_a_leaked_tracer_is_named_with_the_line_that_made_it(passed):
    leaked = []
    jax.jit(lambda x: leaked.append(x * 2))(jnp.ones(2))
    if passed:
        step, args, name = (lambda tree: tree), [{"a": leaked}], r"args\[0\]\['a'\]\[0\]"
    else:
        step, args, name = (lambda x: x + leaked[0]), [jnp.ones(2)], "an array that the step closes over"
    message = rf"^{name} is a leaked tracer(?s:.)*created on line .*test_misuse"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        mpmd.jit(step, mesh_of(2)).compile(*args)


def test_a_mesh_without_groups():
    with pytest.raises(TypeError, match=r"mpmd_mesh must be mpmd.MpmdMesh"):
        mpmd.jit(STEP, mesh_of(2).jax_mesh)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(lambda *args: f(*args)),
        lambda f: jax.vmap(lambda state, *args: f(state, *args), in_axes=(None, 0, 0)),
    ],
    ids=["jit", "vmap"],
)
def test_a_compiled_step_cannot_be_transformed(transform):
    with pytest.raises(TypeError, match=r"cannot be traced: call it outside of jax.jit"):
        transform(compiled())(start(), *batch())


def test_a_model_with_marks_cannot_be_transposed():
    def linear(params, x):
        for p in params:
            x = mpmd.mark_stage_end(x @ p["w"])
        return x

    def error(params, x, y):
        (transposed,) = jax.linear_transpose(lambda x: linear(params, x), x)(y)
        return jnp.mean(transposed**2)

    with pytest.raises(mpmd.CompileError, match=r"at .*test_misuse.py.* transposes, .*: write jax.vjp\("):
        planned(sgd_step(error, mpmd.Std1F1B(2)), weights(2), *batch())


def test_specs_made_from_arguments_and_results_that_hold_none():
    def step(state, xs, ys, nothing):
        params, rest = state
        results = mpmd.treduce(
            lambda mb: (None, jax.grad(mse)(params, *mb)),
            (xs, ys),
            mpmd.Std1F1B(2),
            operation=(None, mpmd.Add),
        )
        return (jax.tree.map(lambda p, g: p - g, params, results[1]), rest), results

    args = ((weights(2), {"count": None, "trace": (None, jnp.ones(3))}), *batch(), None)
    results = jax.eval_shape(step, *args)
    in_specs, out_specs = (jax.tree.map(lambda _: P(), tree) for tree in (args, results))
    plan = compiled(step, in_specs=in_specs, out_specs=out_specs).lower(*args).plan
    # ``None`` in the specs stands for any leaf or part.
    in_specs, out_specs = ((P(), None), None, P(), None), ((None, P()), P())
    other = compiled(step, in_specs=in_specs, out_specs=out_specs).lower(*args).plan
    assert other.programs == plan.programs


def test_specs_may_come_in_a_list_and_end_in_none_beyond_the_dimensions():
    lowered = compiled(in_specs=[P(None, None, None), P(), P()]).lower(start(), *batch())
    assert lowered.plan.inputs[0].spec == ()


class Mean:
    def state(self, n, a):
        return jnp.zeros(a.shape, a.dtype), jnp.zeros(())

    def update(self, state, update, index):
        return state[0] + update, state[1] + 1


def test_a_gradient_of_integers_is_no_result(mesh):
    step = mpmd.jit(lambda i: {"grad": jax.grad(lambda i: 1.0 * i.sum(), allow_int=True)(i)}, mesh)
    with pytest.raises(mpmd.CompileError, match=r"result\['grad'\]: a gradient of integers \(float0\)"):
        step(jnp.arange(3))


def test_an_operation_whose_state_is_no_array():
    with pytest.raises(TypeError, match=r"Mean.*\.state returned a tuple; the state of an operation is one"):
        mpmd.treduce(lambda x: jnp.sum(x), batch()[0], mpmd.GPipe(1), operation=Mean())


IN_PLACE = {
    operator.iadd: operator.add,
    operator.imatmul: operator.matmul,
    operator.ifloordiv: operator.floordiv,
    operator.ilshift: operator.lshift,
    operator.ior: operator.or_,
}


def totals(xs):
    """An array of integers from a step."""
    return mpmd.treduce(mpmd.mark_stage_end, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)


def test_an_operation_in_place_makes_another_array():
    total = compiled(totals)(jnp.arange(1, 33).reshape(2, 4, 4))
    before = np.array(total)
    for in_place, plain in IN_PLACE.items():
        after = in_place(total, np.full((4, 4), 2))
        np.testing.assert_array_equal(after, plain(before, np.full((4, 4), 2)))
        np.testing.assert_array_equal(total, before)
    written = before.copy()
    written += total  # a numpy array on the left is written to
    np.testing.assert_array_equal(written, 2 * before)


@pytest.mark.parametrize(
    "write",
    [
        lambda array: np.add(array, 1, out=array),
        lambda array: np.add.at(array, 0, 1),
    ],
)
def test_results_cannot_be_written_to(write):
    total = compiled(totals)(jnp.ones((2, 4, 4), int))
    with pytest.raises(TypeError, match=r"must be (of ArrayType|an array|array)"):
        write(total)


@pytest.mark.parametrize(
    ("xs", "message"),
    [
        (np.array([["a", "b"]]), r"args\[1\] is an array of dtype <U1, and JAX computes with numbers only"),
        (np.array([[1], [1, 2]], object), r"args\[1\] is an array of dtype object.*different lengths"),
        (["a", "b"], r"args\[1\]\[0\] is a str, not an array or a number; name its argument in static_argn"),
        (
            [1.0, 2.0],
            r"axis 0, which xs\[0\]\[0\] with shape \(\), .* lacks: .*each number in a list is .*np.asarray",
        ),
    ],
    ids=["strings", "objects", "list of strings", "list of numbers"],
)
def test_batches_that_are_no_arrays_of_numbers(xs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        compiled()(start(), xs, batch()[1])


def test_functions_in_a_model_are_taken_out_of_it(mesh):
    """The activation of an equinox MLP is a leaf."""
    model = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))

    def totals(model, xs):
        def one(x):
            return mpmd.mark_stage_end(jax.vmap(model)(x)).sum()

        return mpmd.treduce(one, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

    step = mpmd.jit(totals, mesh)
    with pytest.raises(
        TypeError, match=r"args\[0\]\.activation is a .*eqx\.partition\(model, eqx\.is_array\)"
    ):
        step(model, jnp.ones((2, 3, 2)))
    with pytest.raises(TypeError, match=r"args\[1\] is a function.*static_argnums"):
        step(eqx.filter(model, eqx.is_array), jnp.sum)
    arrays, rest = eqx.partition(model, eqx.is_array)
    step = mpmd.jit(lambda arrays, xs: totals(eqx.combine(arrays, rest), xs), mesh)
    assert_close(step(arrays, jnp.ones((2, 3, 2))), totals(model, jnp.ones((2, 3, 2))))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"in_specs": (([{"w": P()}, P()], P()), P(), P())}, r"in_shardings.*\[0\]\[0\]\[0\]"),
        (
            {"in_shardings": (P(), P())},
            "in_shardings is not a pytree prefix .*of length 2, but .* of length 3",
        ),
        ({"out_shardings": (P(), P(), P())}, "out_shardings is not a pytree prefix .*of length 3, but"),
        ({"donate_argnums": 7}, r"donate_argnums has \[7\], but the step takes 3 positional"),
        ({"static_argnums": 3}, r"static_argnums has \[3\], but the step takes 3 positional"),
        ({"static_argnums": 0, "donate_argnums": 0}, r"the arguments \[0\] are both static and donated"),
        ({"static_argnums": 0}, "the static argument 0 is a tuple, which is not hashable; arrays"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, said):
    with pytest.raises((ValueError, TypeError)) as caught:
        compiled(**options)(start(), *batch())
    message = str(caught.value)
    assert re.search(said, message, re.DOTALL) and len(message) < 500, message
