"""A scan with marks is cut where it is called, whatever transforms the function that calls it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpmd
from mpmd.ir.stack import Stack
from tests.support.models import WIDTH, planned

LAYERS, STAGES = 6, 3


def model(w, x):
    def body(h, w):
        return mpmd.mark_stage_end(jnp.tanh(h @ w), num_stages=STAGES), None

    return lax.scan(body, x, w)[0]


def loss(w, x):
    return jnp.mean(model(w, x) ** 2)


@jax.custom_vjp
def with_a_rule(w, x):
    return loss(w, x)


with_a_rule.defvjp(lambda w, x: jax.vjp(loss, w, x), lambda pullback, ct: pullback(ct))

CALLS = {"jit": jax.grad(jax.jit(loss)), "custom_vjp": jax.grad(with_a_rule)}


def stack_of(call):
    """The parts of the weights in a planned step of ``call(w, x)``."""

    def step(w, xs):
        return mpmd.treduce(lambda x: call(w, x), xs, mpmd.GPipe(STAGES), operation=mpmd.Add)

    lowered = planned(step, jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((4, 2, WIDTH)), groups=STAGES)
    return lowered.compiled.step.argument_leaves[0].stack


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_marked_scan_is_cut_within(call):
    assert stack_of(call) == Stack(0, (2, 2, 2))


def test_a_marked_scan_is_one_scan_outside_of_a_compiled_loop():
    eqns = jax.make_jaxpr(model)(jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((2, WIDTH))).eqns
    assert [str(eqn.primitive) for eqn in eqns] == ["scan"]


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_a_mark_in_a_function_with_a_rule_of_its_own_is_refused_in_a_scan(kind):
    def act(h):
        return mpmd.mark_stage_end(jnp.tanh(h), num_stages=STAGES)

    ruled = getattr(jax, kind)(act)
    if kind == "custom_jvp":
        ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[0]))
    else:
        ruled.defvjp(lambda h: (act(h), None), lambda _, ct: (ct,))

    def loss(w, x):
        return jnp.mean(lax.scan(lambda h, w: (ruled(h @ w), None), x, w)[0] ** 2)

    with pytest.raises(mpmd.CompileError, match="mark what the function returns"):
        stack_of(jax.grad(loss))


def test_a_scan_over_no_layers_has_no_stage():
    def loss_of_both(w, x):
        def body(h, w):
            return mpmd.mark_stage_end(h @ w), None

        return jnp.mean(lax.scan(body, model(w, x), jnp.zeros((0, WIDTH, WIDTH)))[0] ** 2)

    assert stack_of(jax.grad(loss_of_both)) == Stack(0, (2, 2, 2))
