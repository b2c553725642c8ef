"""Equations evaluated one by one: their results, and the origins of what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from mpmd.capture.blocks import equations_of
from mpmd.capture.exports import Exports
from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.replay.evaluate import Evaluator
from mpmd.replay.exported import function_of
from mpmd.replay.modules import MAIN, Module
from mpmd.replay.record import Equations

AXES = (("data", 2),)
GROUP = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def evaluated(fun, *args, known=None, platform="cpu"):
    """The results of a function, and its evaluator; ``known`` says which arguments are."""
    jaxpr, constants = canonical(jax.make_jaxpr(fun)(*args))
    assert isinstance(jaxpr, Jaxpr)
    arrays = [*map(np.asarray, constants.values()), *map(np.asarray, jax.tree.leaves(args))]
    exports = Exports(GROUP, platform)
    sources, block = equations_of(jaxpr, exports)
    equations = Equations(sources, block, exports.of_equations(), None)

    def call_of(number):
        export = equations.exports[number]
        code = exports.codes[export.file]
        alone = code if export.function == MAIN else Module(code).alone(export.function)
        return function_of(export, alone, AXES)

    evaluator = Evaluator(equations, call_of)
    known = [True] * len(arrays) if known is None else known
    results = evaluator.run([a if is_known else None for a, is_known in zip(arrays, known, strict=True)])
    return results, evaluator


def assert_same(fun, *args):
    results, evaluator = evaluated(fun, *args)
    assert not evaluator.skipped
    for result, expected in zip(results, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        assert result.array.dtype == expected.dtype
        np.testing.assert_allclose(result.array, expected, rtol=1e-5, atol=1e-6)


def scans(x):
    return jax.lax.scan(lambda h, row: (jnp.tanh(h + row), h * 2), x[0], x, reverse=True)


def no_iterations(x):
    return jax.lax.scan(lambda h, row: (h + row, h * row), x[0], x[:0])


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


def test_what_each_device_computes_needs_as_many():
    (result,), evaluator = evaluated(on_each_device, X)
    assert not evaluator.skipped
    np.testing.assert_array_equal(result.array, 2 * X.sum(0, keepdims=True))


def test_equations_of_a_gpu_are_evaluated_on_cpus():
    (result,), evaluator = evaluated(lambda x: jnp.tanh(x @ x.T) + 1, X, platform="cuda")
    assert not evaluator.skipped
    np.testing.assert_allclose(result.array, np.tanh(X @ X.T) + 1, rtol=1e-5)


def origin(fun, *args):
    results, _ = evaluated(fun, *args)
    return results[0].origin


def test_a_nan_of_finite_numbers_with_its_iteration():
    def scan(x):
        return jax.lax.scan(lambda h, row: (h + 1, jnp.log(row)), 0, x)[1]

    at = origin(scan, X[:, 1:])
    assert (at.kind, at.source.primitive) == ("NaN", "log")
    assert at.path[1] == "iteration 0 of 2" and "test_evaluate.py" in at.source.line
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
    results, evaluator = evaluated(lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)), X[:, 1:] + 1)
    assert results[0].origin is None and evaluator.origins == []


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
    results, evaluator = evaluated(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), X)
    assert results[0].origin is None
    assert [at.source.primitive for at in evaluator.origins] == ["log"]


def test_nothing_is_known_of_what_depends_on_a_lost_operand():
    results, _ = evaluated(lambda x, y: (x + 1, x + y), X, X, known=[True, False])
    assert results[0].array is not None and results[1].array is None


def test_an_equation_without_a_portable_form_is_named():
    def calls_back(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, shape, x) + 1, x * 2

    results, evaluator = evaluated(calls_back, X)
    assert results[0].array is None and results[1].array is not None
    assert len(evaluator.skipped) == 1


def test_equal_equations_are_exported_once():
    exports = Exports(GROUP, "cpu")
    jaxpr, _ = canonical(jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(jnp.sin(x)) + 1) + 1)(X))
    equations_of(jaxpr, exports)
    assert len(exports.of_equations()) == 2 and len(exports.codes) == 1
