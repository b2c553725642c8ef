"""Products that are only transposed have their operands exchanged, and compute the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.equations import all_eqns
from tests.support.effort import costly


def names_of(jaxpr):
    """The primitives of all equations, those of bodies, too."""
    return [eqn.primitive.name for eqn in all_eqns(jaxpr.eqns)]


def rewritten(fun, *args):
    """The canonical form of a function, and its results beside those of the function."""
    jaxpr, constants = canonical(jax.make_jaxpr(fun)(*args))
    results = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*constants.values(), *jax.tree.leaves(args))
    for result, expected in zip(results, jax.tree.leaves(fun(*args)), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    return jaxpr


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


def test_those_in_bodies_are_not_transposed():
    def loss(w, x):
        return jnp.sum(lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, w)[0])

    assert "transpose" not in names_of(rewritten(jax.grad(loss), normal(3, 4, 4), normal(2, 3, 4)))


@costly
@given(st.data())
def test_any_product_and_transposition_compute_the_same(data):
    batched, first, second, contracted = (data.draw(st.integers(0, 2)) for _ in range(4))
    sizes = iter((2, 3, 1, 4, 5, 2, 3, 2))
    batch, of_first, of_second, summed = (
        [next(sizes) for _ in range(n)] for n in (batched, first, second, contracted)
    )
    # The dimensions of each operand are in any order.
    order_a = data.draw(st.permutations(range(batched + first + contracted)))
    order_b = data.draw(st.permutations(range(batched + second + contracted)))
    a = normal(*batch, *of_first, *summed).transpose(order_a)
    b = normal(*batch, *of_second, *summed).transpose(order_b)
    places_a, places_b = (
        [list(order).index(dim) for dim in range(len(order))] for order in (order_a, order_b)
    )
    dimensions = (
        (places_a[batched + first :], places_b[batched + second :]),
        (places_a[:batched], places_b[:batched]),
    )
    permutation = data.draw(st.permutations(range(batched + first + second)))
    precision = data.draw(st.sampled_from([None, (lax.Precision.DEFAULT, lax.Precision.HIGHEST)]))

    def transposed(a, b):
        return lax.transpose(lax.dot_general(a, b, dimensions, precision), permutation)

    exchanged = [
        *range(batched),
        *range(batched + first, batched + first + second),
        *range(batched, batched + first),
    ]
    before = names_of(jax.make_jaxpr(transposed)(a, b).jaxpr)
    after = names_of(rewritten(transposed, a, b))
    assert ("transpose" in after) == ("transpose" in before and list(permutation) != exchanged)


def test_each_operand_keeps_its_precision():
    precision = (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
    jaxpr = rewritten(lambda a, b: lax.dot(a, b, precision=precision).T, normal(2, 3), normal(3, 4))
    (eqn,) = jaxpr.eqns
    assert eqn.invars == jaxpr.invars[::-1]
    assert eqn.params["precision"] == precision[::-1]


def test_an_algorithm_keeps_what_it_does_with_each_operand():
    bfloat16, float32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    algorithm = lax.DotAlgorithm(bfloat16, float32, float32, 1, 3, 6, True)

    def transposed(a, b):
        return lax.dot(a, b, precision=algorithm, preferred_element_type=float32).T

    (eqn,) = canonical(jax.make_jaxpr(transposed)(normal(2, 3), normal(3, 4)))[0].eqns
    assert eqn.params["precision"] == lax.DotAlgorithm(float32, bfloat16, float32, 3, 1, 6, True)
    assert isinstance(eqn.params["precision"], lax.DotAlgorithm)


@pytest.mark.parametrize(
    "fun", [lambda a, b: ((a @ b).T, a @ b), lambda a, b: (lambda ab: (ab.T, ab))(a @ b)], ids=["two", "one"]
)
def test_a_product_that_others_read_stays(fun):
    jaxpr = rewritten(fun, normal(2, 3), normal(3, 4))
    assert sum(name == "dot_general" for name in names_of(jaxpr)) == names_of(
        jax.make_jaxpr(fun)(normal(2, 3), normal(3, 4)).jaxpr
    ).count("dot_general")
