"""Which parts of equations JAX leaves out, with the rule for loops that importing the compiler adds."""

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

import mpmd.compiler.jaxprs.control_flow  # noqa: F401


def _live(fun, *args):
    live, _ = partial_eval.dce_jaxpr(jax.make_jaxpr(fun)(*args).jaxpr, True, True)
    return live


def _sum_beside(n, x, update):
    """The sum of a ``while`` which also carries a value that nobody reads."""

    def body(carry):
        i, total, unread = carry
        return i + 1, total + x, update(unread)

    return jax.lax.while_loop(lambda carry: carry[0] < n, body, (0, x, x))[1]


def test_loops_carry_what_is_read():
    (loop,) = _live(lambda n, x: _sum_beside(n, x, jnp.sin), 3, 1.0).eqns
    assert len(loop.outvars) == 2


def test_callbacks_in_loops_stay():
    def update(unread):
        jax.debug.print("{}", unread)
        return jnp.sin(unread)

    (loop,) = _live(lambda n, x: _sum_beside(n, x, update), 3, 1.0).eqns
    assert len(loop.outvars) == 3
    assert loop.effects


def test_loops_that_read_references_stay_as_jax_leaves_them():
    def fun(n, x):
        ref = jax.new_ref(x)
        return _sum_beside(n, x, lambda unread: unread * ref[...])

    _live(fun, 3, 1.0)
    assert jax.jit(fun)(3, 1.0) == 4.0
