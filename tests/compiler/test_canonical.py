"""The canonical form: no calls, no constants within bodies, and the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from mpmd.compiler.jaxprs.canonical import canonical, canonical_faults
from mpmd.compiler.jaxprs.remat import without_remat
from tests.support.parity import mesh_of
from tests.support.primitives import primitives_of

TABLE = jnp.arange(3.0)
OTHER = jnp.ones(3) / 3
X = jnp.array([0.5, -1.0, 2.0])

closing = jax.jit(lambda x: x + TABLE)
closing_twice = jax.jit(lambda x: closing(x) * OTHER)


@jax.custom_jvp
def with_jvp(x):
    return closing(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jax.nn.relu(x) + OTHER


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (g * x,))


def scanned(x):
    return lax.scan(lambda c, _: (closing(c) * 0.5, closing_twice(c)), x, length=3)


def repeated(x):
    return lax.while_loop(lambda c: closing(c).sum() < 20, lambda c: 4 * closing_twice(c), jnp.abs(x))


def chosen(x):
    return lax.switch(x.sum().astype(int), [closing, closing_twice, lambda x: x], x)


def nested(x):
    body = jax.checkpoint(lambda x: chosen(scanned(x)[0]))
    return lax.fori_loop(0, 2, lambda i, c: jnp.tanh(body(c)), x)


def derivative(x):
    return jax.grad(lambda x: jnp.sum(nested(with_vjp(with_jvp(x)))[0] ** 2))(x)


def tuple_of_barriers(x):
    return jax.checkpoint(lambda x, y: closing(x) * y, prevent_cse=(True, False))(x, x)


def solved(x):
    return jnp.linalg.solve(jnp.eye(3) + x[:, None] * x, with_jvp(x))


FUNCTIONS = [
    closing,
    closing_twice,
    with_jvp,
    with_vjp,
    scanned,
    repeated,
    chosen,
    nested,
    derivative,
    tuple_of_barriers,
    solved,
]


def evaluated(fun, *arguments):
    jaxpr, constants = canonical(jax.make_jaxpr(fun)(*arguments))
    results = jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr, ())))(*constants.values(), *arguments)
    return jaxpr, constants, results


@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda fun: fun.__name__)
def test_values_stay_bit_by_bit(fun):
    jaxpr, _, results = evaluated(fun, X)
    assert not list(canonical_faults(jaxpr.eqns))
    assert not {"jit", "custom_jvp_call", "custom_vjp_call", "custom_linear_solve"} & primitives_of(jaxpr)
    for value, expected in zip(results, jax.tree.leaves(jax.jit(fun)(X)), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_it_is_made_once():
    jaxpr, _, _ = evaluated(derivative, X)
    again, constants = canonical(ClosedJaxpr(jaxpr, ()))
    assert not constants and str(again) == str(jaxpr)


def test_each_array_is_one_constant():
    _, constants, _ = evaluated(lambda x: nested(closing(scanned(x)[0])), X)
    assert len(constants) == 2 and {id(value) for value in constants.values()} == {id(TABLE), id(OTHER)}


def test_a_function_that_is_called_twice_has_one_body():
    """So whoever reads bodies reads it once."""
    inner = jax.jit(lambda x: lax.scan(lambda c, _: (jnp.where(c > 0, c, 0.1), None), x, length=2)[0])
    jaxpr, _, _ = evaluated(lambda x: inner(inner(x)), X)
    one, other = (eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert one is other


def test_branches_have_variables_of_their_own():
    """Also those of a rematerialised function that is opened twice."""
    inner = jax.checkpoint(jax.jit(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)))
    jaxpr, _, _ = evaluated(lambda x: inner(inner(x)), X)
    eqns = without_remat(jaxpr.eqns)
    branches = [b.jaxpr for eqn in eqns if eqn.primitive.name == "cond" for b in eqn.params["branches"]]
    defined = [var for branch in branches for var in (*branch.invars, *branch.eqns[0].outvars)]
    assert len(branches) == 4 and len(set(defined)) == 8


def test_what_is_not_canonical_is_named():
    faults = canonical_faults(jax.make_jaxpr(lambda x: scanned(jax.jit(jnp.sin)(x)))(X).eqns)
    assert list(faults) == ["jit is a call"] * 3, "of which two are in the body of the scan"
    (scan,) = (eqn for eqn in evaluated(scanned, X)[0].eqns if eqn.primitive.name == "scan")
    body = scan.params["jaxpr"].jaxpr
    closing_over = body.replace(constvars=body.invars[:2], invars=body.invars[2:])
    wrong = scan.replace(params={**scan.params, "jaxpr": ClosedJaxpr(closing_over, (TABLE, OTHER))})
    assert list(canonical_faults([wrong])) == ["a body of scan closes over arrays"]


def test_in_bodies_calls_say_how_values_are_sharded():
    """Outside of them, what users say of the step's arguments and results decides."""
    with mesh_of(1, data=2) as mesh:
        sharding = NamedSharding(mesh.unstack[0], PartitionSpec("data"))
        inner = jax.jit(jnp.sin, in_shardings=sharding, out_shardings=sharding)
        x = jnp.ones(4)
        jaxpr, _ = canonical(
            jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (inner(c), None), inner(x), length=2))(x)
        )
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert "sharding_constraint" not in {eqn.primitive.name for eqn in jaxpr.eqns}
    inside = scan.params["jaxpr"].jaxpr.eqns
    assert [eqn.primitive.name for eqn in inside] == ["sharding_constraint", "sin", "sharding_constraint"]
    assert {eqn.params["sharding"] for eqn in inside if eqn.primitive.name != "sin"} == {sharding}
