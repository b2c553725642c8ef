"""Which parts of equations JAX leaves out, with the rule for loops that importing the compiler adds."""

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

import mpmd.compiler.jaxprs.control_flow  # noqa: F401


def _loop(fun):
    """The loop that is left of a function of a number of iterations and a value."""
    live, _ = partial_eval.dce_jaxpr(jax.make_jaxpr(fun)(3, 1.0).jaxpr, True, True)
    (loop,) = (eqn for eqn in live.eqns if eqn.primitive.name == "while")
    return loop


def _sum_beside(update):
    """The sum of a ``while`` which also carries a value that nobody reads."""

    def fun(n, x):
        def body(carry):
            i, total, unread = carry
            return i + 1, total + x, update(unread)

        return jax.lax.while_loop(lambda carry: carry[0] < n, body, (0, x, x))[1]

    return fun


def test_callbacks_in_loops_stay():
    def update(unread):
        jax.debug.print("{}", unread)
        return jnp.sin(unread)

    loop = _loop(_sum_beside(update))
    assert len(loop.outvars) == 3 and loop.effects
    assert len(_loop(_sum_beside(jnp.sin)).outvars) == 2


def test_loops_that_read_references_stay_as_jax_leaves_them():
    def fun(n, x):
        ref = jax.new_ref(x)
        return _sum_beside(lambda unread: unread * ref[...])(n, x)

    _loop(fun)
    assert jax.jit(fun)(3, 1.0) == 4.0
