"""Rules for values in parts, each against the function as it is written."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import mpmd
from mpmd.compiler.cut_layers.cut import cut_stacks
from mpmd.compiler.cut_scans import iterations_of
from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.ir.stack import Stack

UNEVEN = Stack(0, (2, 1, 3))


def argument(shape=(6, 4, 3)):
    return np.float32(np.arange(np.prod(shape)) % 11 - 5).reshape(shape)


def cut(fun, *arguments, stack):
    """The function of the parts of its first argument, as JAX traces it."""
    jaxpr, constants = canonical(jax.make_jaxpr(fun)(*arguments))
    jaxpr = jaxpr.replace(invars=jaxpr.invars[len(constants) :])
    made = cut_stacks(jaxpr, constants, (), [stack] + [None] * (len(arguments) - 1))
    consts = list(made.constants)
    called = ClosedJaxpr(made.jaxpr.replace(invars=[*consts, *made.jaxpr.invars]), ())
    parts = [
        part
        for array, stack in zip(arguments, made.argument_stacks, strict=True)
        for part in (stack.cut(array) if stack else (array,))
    ]
    results = iter(jax.jit(jaxpr_as_fun(called))(*made.constants.values(), *parts))
    joined = [
        stack.join([next(results) for _ in stack.sizes]) if stack else next(results)
        for stack in made.result_stacks
    ]
    return joined, made


KEPT = {
    "moved": lambda x: (jnp.transpose(x, (2, 0, 1)), jnp.broadcast_to(x[None], (2, *x.shape)) * x),
    "reshaped": lambda x: (
        x.reshape(6, 12),
        x.reshape(24, 3) * 2,  # merged with the dimension behind
        jnp.sin(x.reshape(-1)).reshape(x.shape),
        jnp.expand_dims(x, (0, 2)).squeeze(2) * 3,
    ),
    "reduced over other dimensions": lambda x: (x.sum(1), x.max(2), x.argmax(1), (x > 0).all(-1)),
    "products": lambda x: (
        jnp.einsum("lij,lkj->lik", x, x),
        jnp.einsum("lij,jk->lik", x, jnp.ones((3, 5))),
        jnp.einsum("ki,lij->lkj", jnp.ones((5, 4)), x),
    ),
    "cumulative": lambda x: (jnp.cumsum(x, 1), jnp.sort(x, -1), x[:, ::-1], lax.top_k(x, 2)),
    "other dimensions": lambda x: (
        jnp.pad(x, ((0, 0), (1, 2), (0, 0))),
        x[:, 1:3],
        x[:, 2],
        lax.dynamic_slice_in_dim(x, 1, 2, 1),
        lax.dynamic_update_slice_in_dim(x, x[:, :2], 1, 1),
        jnp.concatenate([x, 2 * x], 1),
        jnp.stack([x, x], 1),
        jnp.split(x, 2, 1),
    ),
    "control flow": lambda x: (
        lax.cond(x[0, 0, 0] > 0, lambda x: (jnp.sin(x), x[1]), lambda x: (x, x[2]), x),
        lax.map(lambda row: jnp.tanh(row) @ row.T, x),
        lax.scan(lambda c, row: (c + row, c * row), jnp.zeros((4, 3)), x)[1],
        lax.fori_loop(0, 3, lambda i, x: x - x @ jnp.matrix_transpose(x) @ x / (9 + i), x),
    ),
    "scans of each layer": lambda x: jax.vmap(
        lambda row: (
            lax.scan(lambda c, r: (jax.jit(jnp.sin)(c) * r + row.sum(), c * 2), row[0], row),
            lax.scan(
                lambda c, r: (lax.fori_loop(0, 2, lambda i, c: jnp.cos(c) + i, c) + r, None),
                row[0],
                row[::-1],
            )[0],
        )
    )(x),
    "calls": lambda x: (
        jax.jit(lambda x: jnp.clip(x, -1, 1))(x),
        jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x),
        jax.vmap(lambda row: jax.nn.softmax(row @ row.T))(x),
    ),
    "random numbers": lambda x: (
        jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(0), 6)) + x[:, 0, 0],
        x + jax.random.normal(jax.random.key(0), x.shape),
    ),
    "put together of layers": lambda x: (
        jnp.stack([x[i] * i for i in range(6)]) + x,
        x + jnp.pad(x[1:4], ((1, 2), (0, 0), (0, 0)), constant_values=7),
        jnp.stack(list(x)) + x,
        x[::-1][::-1] + jnp.flip(jnp.flip(x, (0, 1)) * 2, 0),
    ),
    "concatenated of slices": lambda x: jnp.concatenate([x[:2] * 2, x[2:] / 2]) + x,
    "rows taken by indices": lambda x: (
        jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
        x[:, jnp.array([3, 0])],
        jax.vmap(lambda row, i: row[i % 4, jnp.array([0, 2])])(x, jnp.arange(6)),
        jnp.eye(12)[x[..., 0].astype(jnp.int32)],
        x.at[:, 9].get(mode="fill", fill_value=7),
    ),
    "rows set and added to": lambda x: (
        x.at[:, 1].set(x[:, 2]),
        x.at[:, jnp.array([1, 1]), :2].add(2.0),
        jax.vmap(lambda row, i: row.at[i % 4].multiply(row[0]).at[i % 3, 1].max(1.0))(x, jnp.arange(6)),
    ),
    "differences of layers": lambda x: jnp.pad(x[1:] - x[:-1], ((0, 1), (0, 0), (0, 0))) + x,
}


@pytest.mark.parametrize("name", KEPT)
def test_results_with_the_layers_are_in_parts(name):
    fun, x = KEPT[name], argument()
    expected = jax.tree.leaves(jax.jit(fun)(x))
    with warnings.catch_warnings():
        if name in ("differences of layers", "concatenated of slices"):
            warnings.simplefilter("ignore", mpmd.PerformanceWarning)
        actual, made = cut(fun, x, stack=UNEVEN)
    for result, wanted, stack in zip(actual, expected, made.result_stacks, strict=True):
        np.testing.assert_allclose(np.float32(result), np.float32(wanted), rtol=1e-6, atol=1e-6)
        assert (stack is None) == (6 not in wanted.shape and not {24, 72} & {*wanted.shape})
        if stack is not None:
            layers = wanted.shape[stack.axis]
            assert stack.sizes == tuple(size * layers // 6 for size in UNEVEN.sizes)


WHOLE = {
    "reductions": lambda x: (
        x.sum(),
        x.sum(0),
        x.max(0),
        x.min(),
        (x > 0).any(),
        (x > -9).all(),
        jnp.mean(x**2),
    ),
    "contractions": lambda x: (
        jnp.einsum("lij,lik->jk", x, x),
        jnp.tensordot(jnp.arange(6.0), x, 1),
        jnp.vdot(x, x),
    ),
    "scans": lambda x: (
        lax.scan(lambda c, row: (jnp.tanh(c + row), None), jnp.zeros((4, 3)), x)[0],
        lax.scan(lambda c, row: (jnp.tanh(c + row), None), jnp.zeros((4, 3)), x, reverse=True)[0],
        lax.scan(lambda c, row: (c + row, None), jnp.ones((4, 3)), x)[0],
        lax.scan(lambda c, row: (row, None), jnp.ones((4, 3)), x)[0],
    ),
    "some layers": lambda x: (x[2], x[-1], x[1:4, 2:, 1].sum()),
}


@pytest.mark.parametrize("name", WHOLE)
def test_results_without_the_layers_are_made_of_parts(name):
    fun, x = WHOLE[name], argument() / 4
    expected = jax.tree.leaves(jax.jit(fun)(x))
    actual, made = cut(fun, x, stack=UNEVEN)
    for result, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)
    assert made.result_stacks == (None,) * len(expected)


FALLBACKS = {
    "cumulative over the layers": (lambda x: jnp.cumsum(x, 0), "cumsum"),
    "argmax over the layers": (lambda x: x.argmax(0), "argmax"),
    "every second layer of uneven parts": (lambda x: x[::2], "slice"),
    "some layers": (lambda x: x[jnp.array([3, 1])], "gather"),
    "some layers that are added to": (lambda x: x.at[jnp.array([2, 0])].add(1.0), "scatter-add"),
    "an unknown layer": (lambda x: x[jnp.int32(x[0, 0, 0])], "dynamic_slice"),
    "layers that are not the major ones of a merge": (
        lambda x: x.transpose(1, 0, 2).reshape(24, 3),
        "reshape",
    ),
    "a product of layers with layers": (lambda x: jnp.einsum("lij,kij->lk", x, x), "dot_general"),
    "a loop that mixes layers": (lambda x: lax.fori_loop(0, 3, lambda i, x: x + jnp.sin(x)[::-1], x), "scan"),
    "a loop that adds up layers": (lambda x: lax.fori_loop(0, 3, lambda i, x: x / 2 + x.sum(), x), "scan"),
    "a loop of unknown length": (
        lambda x: lax.while_loop(lambda x: x[0, 0, 0] < -1, lambda x: x / 2, x),
        "while",
    ),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_has_no_rule_is_made_of_the_whole_and_says_so(name):
    fun, primitive = FALLBACKS[name]
    x = argument() / 4
    with pytest.warns(mpmd.PerformanceWarning, match=rf"{primitive} at \S*test_stacks\.py:\d+ .*reads all"):
        actual, _ = cut(fun, x, stack=UNEVEN)
    np.testing.assert_allclose(actual[0], jax.jit(fun)(x), rtol=1e-6, atol=1e-6)


def test_reversed_layers_are_in_reversed_parts():
    x = argument()
    (flipped, norm), made = cut(lambda x: (x[::-1] * 2, (x[::-1] ** 2).sum()), x, stack=UNEVEN)
    assert made.result_stacks == (Stack(0, UNEVEN.sizes[::-1]), None)
    np.testing.assert_array_equal(flipped, x[::-1] * 2)
    np.testing.assert_allclose(norm, (x**2).sum())


@pytest.mark.parametrize("start", [0, 1])
def test_every_second_layer_is_in_the_same_shares(start):
    def fun(x):
        every_second = x[start::2]
        return every_second * 2, jax.vjp(lambda x: x[start::2], x)[1](jnp.sin(every_second))[0]

    x = argument((8, 3))
    (taken, gradient), made = cut(fun, x, stack=Stack(0, (2, 4, 2)))
    assert made.result_stacks == (Stack(0, (1, 2, 1)), Stack(0, (2, 4, 2)))
    np.testing.assert_array_equal(taken, fun(x)[0])
    np.testing.assert_allclose(gradient, fun(x)[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("spread", "length", "counts"),
    [
        ({"every": 2}, 6, (2, 2, 2)),
        ({"every": (1, 3)}, 4, (1, 3)),
        ({"num_stages": 4}, 30, (8, 8, 7, 7)),
        ({"num_stages": 3}, 3, (1, 1, 1)),
        ({}, 2, (1, 1)),
    ],
)
def test_iterations_of_stages(spread, length, counts):
    boundary = mpmd.language.annotate.Boundary(None, **spread)
    assert iterations_of(boundary, length, "here") == counts


def test_numbers_of_layers_and_of_stages_are_not_both_given():
    with pytest.raises(ValueError, match="takes every=2 or num_stages=2, not both"):
        mpmd.mark_stage_end(jnp.ones(2), every=2, num_stages=2)
