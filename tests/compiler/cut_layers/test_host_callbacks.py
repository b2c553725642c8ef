"""Callbacks that give nothing back are taken out of the equations around them; others stay."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

from mpmd.compiler.cut_layers.host_callbacks import with_host_callbacks
from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.equations import subjaxprs
from mpmd.language.callbacks import PYTHON_CALLS, callback_of


def note(*args, **kwargs):
    raise AssertionError("nothing is called here")


def lifted(fun, *args):
    """The callbacks that the driver calls, and whether any is left in the equations."""
    jaxpr, _ = canonical(jax.make_jaxpr(fun)(*args))
    rewritten = with_host_callbacks(jaxpr)
    rest = [eqn for eqn in rewritten.eqns if callback_of(eqn) is None]
    return [callback for eqn in rewritten.eqns if (callback := callback_of(eqn))], any(map(calls, rest))


def calls(eqn):
    inside = (inner for jaxpr in subjaxprs(eqn) for inner in jaxpr.eqns)
    return eqn.primitive.name in PYTHON_CALLS or any(map(calls, inside))


def in_scan(x):
    def body(c, k):
        jax.debug.callback(note, c, k, 3)
        return c + 1, c

    return lax.scan(body, x, jnp.arange(4), reverse=True)


def in_nested_scans(x):
    return lax.scan(lambda c, _: (in_scan(c)[0], None), x, length=3)


def in_conditional(x):
    return lax.cond(x > 0, lambda: jax.debug.print("positive"), lambda: jax.debug.print("{}", x))


def in_scan_in_a_branch(x):
    return lax.cond(x > 0, lambda: in_scan(x)[0], lambda: x)


def in_remat(x):
    @jax.checkpoint
    def block(x):
        jax.debug.callback(note, x)
        return jnp.sin(x)

    return block(x)


def in_calls(x):
    @jax.custom_vjp
    def f(x):
        jax.jit(lambda x: jax.debug.callback(note, x))(x)
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (g,))
    return lax.scan(lambda c, _: (f(c), None), x, None, length=2)


LIFTED = {
    "scan": (in_scan, [(2, [(4, True)], False)]),
    "nested scans": (in_nested_scans, [(2, [(3, False), (4, True)], False)]),
    "conditional": (in_conditional, [(1, [], True), (0, [], True)]),
    "scan in a branch": (in_scan_in_a_branch, [(2, [(4, True)], True)]),
    "remat": (in_remat, [(1, [], False)]),
    "calls in a scan": (in_calls, [(1, [(2, False)], False)]),
}


@pytest.mark.parametrize(("fun", "expected"), LIFTED.values(), ids=LIFTED)
def test_taken_out(fun, expected):
    callbacks, left = lifted(fun, 1.0)
    assert not left
    assert len(callbacks) == len(expected)
    for callback, (variables, scans, conditional) in zip(callbacks, expected, strict=True):
        assert callback.position.count(None) == len(scans)
        assert len(callback.avals) - len(callback.literals) == variables
        assert [tuple(scan) for scan in callback.scans] == scans
        assert callback.conditional == conditional
        assert "test_host_callbacks.py:" in callback.where


def in_while(x):
    def body(x):
        jax.debug.callback(note, x)
        return x + 1

    return lax.while_loop(lambda x: x < 3, body, x)


def read(x):
    return io_callback(note, x, x) + 1


def returned(x):
    return io_callback(note, x, x)


def pure(x):
    return jax.pure_callback(note, x, x) + 1


@pytest.mark.parametrize("fun", [in_while, read, returned, pure])
def test_left_in_place(fun):
    callbacks, left = lifted(fun, 1.0)
    assert left and not callbacks
