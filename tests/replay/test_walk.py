"""Equations evaluated one by one: their values, and the origins of what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from mpmd.capture.walk import range_of, walk
from mpmd.compiler.jaxprs.canonical import canonical

GROUP = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def evaluated(fun, *args, lost=(), residuals=(), group=GROUP):
    """The evaluation of a function; ``lost`` are the positions of arguments, ``residuals`` of results."""
    jaxpr, constants = canonical(jax.make_jaxpr(fun)(*args))
    assert isinstance(jaxpr, Jaxpr)
    arrays = [None if i in lost else np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(args))]
    passed_on = [i not in residuals for i in range(len(jaxpr.outvars))]
    return walk(jaxpr, [*map(np.asarray, constants.values()), *arrays], group, passed_on)


def negative(leaf):
    """Numbers of which ``log`` makes NaNs: their range is then that of the operand of an origin."""
    return -1 - jnp.abs(leaf.astype(jnp.float32))


def assert_same(fun, *args, group=GROUP):
    def with_nans(*args):
        return [jnp.log(negative(leaf)) for leaf in jax.tree.leaves(fun(*args))]

    evaluation = evaluated(with_nans, *args, group=group)
    assert not evaluation.skipped and evaluation.reaches_result
    origins = sorted([evaluation.first, *evaluation.others], key=lambda origin: origin.number)
    for origin, leaf in zip(origins, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        expected = range_of(np.asarray(negative(leaf)))
        (found,) = origin.operands
        assert (origin.source.primitive, found.shape) == ("log", expected.shape)
        np.testing.assert_allclose([found.low, found.high], [expected.low, expected.high], rtol=1e-5)


def scans(x):
    return jax.lax.scan(lambda h, row: (jnp.tanh(h + row), h * 2), x[0], x, reverse=True)


def no_iterations(x):
    h, rows = jax.lax.scan(lambda h, row: (h + row, h * row), x[0], x[:0])
    return h + rows.sum(0)


def loops(x):
    return jax.lax.while_loop(lambda h: jnp.sum(h) < 100, lambda h: h * 2 + x, jnp.abs(x))


def branches(x):
    return [jax.lax.switch(i, [jnp.sin, jnp.cos, lambda h: h * 3], x) for i in (0, 2, 7)]


def rematerialised(x):
    return jax.grad(lambda x: jax.checkpoint(lambda h: jnp.sin(h) * h)(x).sum())(x)


def keys(x):
    key = jax.random.key(3)
    return jax.lax.scan(lambda k, row: (jax.random.fold_in(k, 1), jax.random.normal(k, (3,)) + row), key, x)[
        1
    ]


def narrow(x):
    return (x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)), x.astype(jnp.int8), x > 0


def on_each_device(x):
    return jax.shard_map(
        lambda rows: jax.lax.psum(rows * 2, "data"),
        mesh=GROUP,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )(x)


@pytest.mark.usual("scans", "rematerialised")
@pytest.mark.parametrize("fun", [scans, no_iterations, loops, branches, rematerialised, keys, narrow])
def test_results_are_those_of_jit(fun):
    assert_same(jax.jit(fun), X)


def test_what_each_device_computes_takes_as_many():
    first = evaluated(lambda x: jnp.log(negative(on_each_device(x))), X).first
    assert first.operands[0] == range_of(np.asarray(negative(2 * X.sum(0, keepdims=True))))
    large = AbstractMesh((64,), ("data",), axis_types=(AxisType.Auto,))
    ((source, reason),) = evaluated(on_each_device, X, group=large).skipped
    assert source.primitive == "shard_map" and "it takes the 64 devices of its group" in reason


def origin(fun, *args):
    evaluation = evaluated(fun, *args)
    assert evaluation.reaches_result == (evaluation.first is not None)
    return evaluation.first


def test_a_nan_of_finite_numbers_with_its_iteration():
    def scan(x):
        return jax.lax.scan(lambda h, row: (h + 1, jnp.log(row)), 0, x)[1]

    at = origin(scan, X[:, 1:])
    assert (at.kind, at.source.primitive) == ("NaN", "log")
    assert at.path[1] == "iteration 0 of 2" and "test_walk.py" in at.source.line
    assert (at.operands[0].low, at.results[0].num_nans) == (X[0, 1], 2)


def test_a_nan_in_the_body_of_a_while_loop():
    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sqrt(c[1] - 0.6)), (0, x))[1]

    at = origin(loop, np.float32(1.0))
    assert at.path[1] == "iteration 2" and at.source.primitive == "sqrt"


def test_a_nan_comes_from_the_infinity_that_it_is_made_of():
    at = origin(lambda x: jnp.exp(x * 1000) - jnp.exp(x * 1000), X)
    assert (at.kind, at.source.primitive) == ("infinity", "exp")


def test_a_mask_of_infinities_does_no_harm():
    assert origin(lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)), X[:, 1:] + 1) is None


def test_a_mask_of_infinities_alone_makes_a_nan():
    at = origin(lambda x: jax.nn.softmax(jnp.where(x > 5, x, -jnp.inf)), X)
    assert (at.kind, at.source.primitive) == ("NaN", "sub")


def test_an_overflow_beside_a_mask_of_infinities():
    def unstable_softmax(x):
        exponentials = jnp.exp(jnp.where(x > 0, x, -jnp.inf) * 1000)
        return exponentials / exponentials.sum(-1, keepdims=True)

    at = origin(unstable_softmax, X)
    assert (at.kind, at.source.primitive) == ("infinity", "exp")


def test_a_nan_beside_that_of_an_input():
    rows = np.array([np.nan, -1.0, 4.0], np.float32)
    at = origin(lambda x: jnp.sqrt(x) * 2, rows)
    assert (at.kind, at.source.primitive, at.results[0].num_nans) == ("NaN", "sqrt", 2)
    assert origin(lambda x: jnp.sqrt(x) * 2, np.abs(rows)) is None


def test_what_is_dropped_is_an_origin_of_no_result():
    evaluation = evaluated(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), X)
    assert not evaluation.reaches_result and evaluation.first.source.primitive == "log"


def test_results_that_are_passed_on_count_before_residuals_and_nans_before_infinities():
    def task(x):
        return jnp.sqrt(x), jnp.exp(x * 1000), jnp.log(x)

    evaluation = evaluated(task, X, residuals=(0,))
    assert evaluation.first.source.primitive == "log"
    assert [each.source.primitive for each in evaluation.others] == ["sqrt", "exp"]


def test_nothing_is_known_of_what_depends_on_a_lost_operand():
    def task(x, y):
        return jnp.log(x + y), jax.lax.cond(y[0, 0] > 0, jnp.log, jnp.sqrt, x), jnp.sqrt(x)

    evaluation = evaluated(task, X, X, lost=(1,))
    assert evaluation.first.source.primitive == "sqrt" and not evaluation.others


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_long_loop_ends_with_the_time(monkeypatch, loop):
    def task(x):
        if loop == "scan":
            h, _ = jax.lax.scan(lambda h, _: (h * 2 + x, None), x, length=10**9)
        else:
            h = jax.lax.while_loop(lambda h: True, lambda h: h, x)
        return jnp.sqrt(x), jnp.log(h)

    monkeypatch.setattr("mpmd.capture.walk._MOST_SECONDS", 0.5)
    first = evaluated(lambda x: (jnp.sqrt(x), *task(x)), X)
    assert first.reaches_result and first.first.source.primitive == "sqrt"
    ((source, reason),) = first.skipped
    assert reason.startswith("stopped after 0.5 s") and "test_walk.py" in source.line
