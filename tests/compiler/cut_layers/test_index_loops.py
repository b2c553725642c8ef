"""Scans that take rows by a counter become scans over rows, and compute what they did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import mpmd
from mpmd.compiler.cut_layers.index_loops import with_rows_scanned
from mpmd.compiler.jaxprs.canonical import canonical

LENGTH = 5


def stack(rows=LENGTH):
    return jnp.sin(jnp.arange(rows * 6.0)).reshape(rows, 3, 2)


def rewritten(fun, *arguments):
    closed = jax.make_jaxpr(fun)(*arguments)
    jaxpr, constants = canonical(closed)
    made = with_rows_scanned(jaxpr, constants)
    return made, jax.jit(jaxpr_as_fun(ClosedJaxpr(made, ())))(
        *constants.values(), *jax.tree.leaves(arguments)
    )


def whole_reads(jaxpr, *arrays):
    """The scans that still read or carry an array whole."""
    shapes = {array.shape for array in arrays}
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            found += [var for var in body.invars if var.aval.shape in shapes]
    return found


def total(fun):
    return lambda *arguments: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fun(*arguments)))


def loop(body, initial=(), length=LENGTH):
    return lax.fori_loop(0, length, body, initial)


def range_scan(body, initial, numbers):
    return lax.scan(lambda carry, i: (body(i, carry), None), initial, numbers)[0]


START = jnp.ones((3, 2))

BY_ROWS = {
    "keys": lambda w: (
        lambda keys: loop(lambda i, h: jnp.tanh(h * w[i]) + jax.random.normal(keys[i], (3, 2)), START)
    )(jax.random.split(jax.random.key(0), LENGTH)),
    "an index": lambda w: loop(lambda i, h: jnp.tanh(h + w[i]), START),
    "a column of a row": lambda w: loop(lambda i, h: h + w[i, :, 1:] * w[i], START),
    "numbers from a range": lambda w: range_scan(lambda i, h: jnp.tanh(h * w[i]), START, jnp.arange(LENGTH)),
    "numbers that are constants": lambda w: range_scan(
        lambda i, h: jnp.tanh(h * w[i]), START, np.arange(LENGTH)
    ),
    "numbers that start later": lambda w: range_scan(
        lambda i, h: jnp.tanh(h * w[i - 7]), START, jnp.arange(LENGTH) + 7
    ),
    "in reverse": lambda w: lax.scan(
        lambda h, i: (jnp.tanh(h * w[i]), h), START, jnp.arange(LENGTH), reverse=True
    ),
    "counted down and turned round": lambda w: lax.scan(
        lambda c, _: ((jnp.tanh(c[0] * w[c[1]]), c[1] - 1), None),
        (START, LENGTH - 1),
        None,
        length=LENGTH,
        reverse=True,
    )[0][0],
    "filled": lambda w: loop(lambda i, h: h + jnp.take(w, i, axis=0, mode="fill"), START),
    "clipped": lambda w: loop(lambda i, h: h + jnp.take(w, i, axis=0, mode="clip"), START),
    "another axis": lambda w: (lambda v: loop(lambda i, h: h + v[..., i], START))(jnp.moveaxis(w, 0, 2)),
    "carried as it is": lambda w: loop(lambda i, c: (c[0], c[1] + c[0][i]), (w, START)),
    "replaced": lambda w: loop(lambda i, c: c.at[i].set(2 * c[i]), w),
    "added to": lambda w: loop(lambda i, c: c.at[i].add(w[i] ** 2), jnp.zeros_like(w)),
    "written and used": lambda w: loop(
        lambda i, c: (jnp.tanh(c[0] + w[i]), c[1].at[i].set(c[0])), (START, jnp.zeros_like(w))
    ),
}

SOME_ROWS = {
    "the first ones": lambda w: loop(lambda i, h: jnp.tanh(h * w[i]), START),
    "the last ones": lambda w: loop(lambda i, h: jnp.tanh(h * w[i + LENGTH]), START),
    "changed in the middle": lambda w: loop(lambda i, c: c.at[i + 2].add(jnp.sin(c[i + 2])), w),
    "pairs": lambda w: loop(lambda i, h: jnp.tanh(h * w[2 * i] + w[2 * i + 1]), START),
    "windows": lambda w: loop(lambda i, h: h + lax.dynamic_slice_in_dim(w, 2 * i, 2).prod(0), START),
    "one of two written": lambda w: loop(lambda i, c: c.at[2 * i + 1].set(c[2 * i]), w),
}


REMATERIALISED = {"an index", "filled", "written and used", "pairs"}


@pytest.mark.usual("keys", "numbers that start later", "another axis", "the first ones", "the last ones")
@pytest.mark.parametrize("name", [*BY_ROWS, *SOME_ROWS])
def test_rows_are_scanned_over_and_so_are_those_of_gradients(name):
    fun = {**BY_ROWS, **SOME_ROWS}[name]
    w = stack(LENGTH if name in BY_ROWS else 2 * LENGTH)
    recomputed = [jax.grad(total(jax.checkpoint(fun)))] if name in REMATERIALISED else []
    for run in (fun, jax.grad(total(fun)), *recomputed):
        made, actual = rewritten(run, w)
        for result, wanted in zip(actual, jax.tree.leaves(jax.jit(run)(w)), strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)
        assert not whole_reads(made, w, jnp.moveaxis(w, 0, 2)), made


FORWARDS = {  # JAX's derivatives of these read all rows
    "products": lambda w: loop(lambda i, c: c.at[i].multiply(w[i]), w),
    "the largest": lambda w: loop(lambda i, c: c.at[i].max(w[i] ** 2).at[i].min(0.5), w),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_updates_by_rows_without_a_gradient(name):
    fun, w = FORWARDS[name], stack()
    made, (actual,) = rewritten(fun, w)
    np.testing.assert_allclose(actual, fun(w), rtol=1e-6)
    assert not whole_reads(made, w)


OTHERS = {
    "an order of their own": lambda w: range_scan(
        lambda i, h: jnp.tanh(h * w[i]), START, np.array([0, 2, 1, 4, 3])
    ),
    "the last one first": lambda w: loop(lambda i, h: jnp.tanh(h * w[LENGTH - 1 - i]), START),
    "a row and the next": lambda w: loop(lambda i, h: jnp.tanh(h * w[i] + w[i + 1]), START, LENGTH - 1),
    "the row before": lambda w: loop(lambda i, c: c.at[i + 1].add(jnp.sin(c[i])), w, LENGTH - 1),
    "rows beyond the end": lambda w: loop(lambda i, h: h + w[i], START, LENGTH + 3),
    "a row and all": lambda w: loop(lambda i, h: jnp.tanh(h * w[i] + w.sum(0)), START),
    "stacked whole": lambda w: lax.scan(lambda c, i: (c.at[i].add(1.0), c), w, jnp.arange(LENGTH)),
    "rows that data chooses": lambda w: loop(lambda i, h: jnp.tanh(h * w[jnp.int32(h[0, 0]) + i]), START),
    "a part of a row replaced": lambda w: loop(lambda i, c: c.at[i, 1].set(jnp.sin(c[i, 2])), w),
    "always the same row": lambda w: loop(lambda i, h: jnp.tanh(h * w[3]), START),
    "a counter that data changes": lambda w: lax.scan(
        lambda c, _: ((c[0] + w[c[1]], c[1] + (c[0][0, 0] > 9).astype(int)), None), (START, 0), None, LENGTH
    )[0],
}


@pytest.mark.usual(
    "an order of their own", "rows beyond the end", "a part of a row replaced", "always the same row"
)
@pytest.mark.parametrize("name", OTHERS)
def test_other_reads_stay_as_they_are(name):
    fun, w = OTHERS[name], stack()
    for run in (fun, jax.grad(total(fun))):
        made, actual = rewritten(run, w)
        for result, wanted in zip(actual, jax.tree.leaves(jax.jit(run)(w)), strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)
        assert whole_reads(made, w)


def test_layers_in_another_order_are_warned_of():
    def fun(w):
        return loop(lambda i, h: mpmd.mark_stage_end(jnp.tanh(h * w[LENGTH - 1 - i])), START)

    with pytest.warns(mpmd.PerformanceWarning, match=r"dynamic_slice at \S*test_index_loops\.py.* layers"):
        rewritten(fun, stack())


def test_a_counter_is_an_element_of_a_range():
    def fun(x):
        body = lambda c, row: ((c[0] * row + c[1] % 3, c[1] + 2), c[1])  # noqa: E731
        return lax.scan(body, (x, 1), jnp.ones((LENGTH, 2)))

    made, actual = rewritten(fun, jnp.ones(2))
    (scan,) = (eqn for eqn in made.eqns if eqn.primitive.name == "scan")
    inside = [var.aval.shape for var in scan.params["jaxpr"].jaxpr.invars]
    assert sorted(inside) == [(), (2,), (2,)] and len(scan.outvars) == 2
    for result, wanted in zip(actual, jax.tree.leaves(fun(jnp.ones(2))), strict=True):
        np.testing.assert_array_equal(result, wanted)
        assert result.dtype == wanted.dtype


def test_scans_that_count_nothing_are_the_same():
    closed = jax.make_jaxpr(lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x))(stack())
    assert with_rows_scanned(closed.jaxpr, {}).eqns[-1] is closed.jaxpr.eqns[-1]
