"""A backward that computes layers again makes the discrete choices of its forward."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import mpmd
from mpmd.language.decisions import Decisions, decided
from tests.support.parity import mesh_of

WIDTH, EXPERTS, TOKENS, MICROBATCHES = 1024, 8, 2, 2

unsteady_p = Primitive("unsteady")
"""The operand, rounded in another way by each executable, and far more coarsely than XLA rounds."""

unsteady_p.def_abstract_eval(lambda x: x)
ad.deflinear2(unsteady_p, lambda cotangent, x: [cotangent])
_executables = itertools.count()


def _rounded(x):
    noise = np.random.default_rng(next(_executables)).normal(size=x.shape)
    return x + noise.astype(x.dtype)


mlir.register_lowering(unsteady_p, mlir.lower_fun(_rounded, multiple_results=False), cacheable=False)


def top_k(logits):
    gates, experts = jax.lax.top_k(jax.nn.softmax(logits), 1)
    return gates, experts[:, 0]


def sorted_experts(logits):
    return jnp.sort(logits)[:, -1:], jnp.argsort(logits)[:, -1]


def argmax_under_jit(logits):
    experts = jax.jit(lambda values: jnp.argmax(values, axis=-1))(logits)
    return jnp.ones((TOKENS, 1)), experts


def rounded_position(logits):
    return jnp.ones((TOKENS, 1)), jnp.clip(jnp.abs(logits[:, 0]) * 8, 0, EXPERTS - 1).astype(jnp.int32)


def predicates(logits):
    experts = [jax.lax.cond(score > 0, lambda: 1, lambda: 0) for score in logits[:, 0]]
    return jnp.ones((TOKENS, 1)), jnp.stack(experts)


def layer(route, weights, x):
    """Adds to each token the vector of its expert; the tokens' experts are the forward's."""
    gates, experts = route(unsteady_p.bind(x @ weights["router"]))
    return x + gates * weights["experts"][experts], experts


def in_turn(function, params, x, ends=(1,)):
    routes = []
    for i, row in enumerate(zip(*params.values(), strict=True)):
        x, experts = function(dict(zip(params, row, strict=True)), x)
        routes.append(experts)
        if i in ends:
            x = mpmd.mark_stage_end(x)
    return x, jnp.stack(routes)


def scanned(function, params, x):
    def body(x, weights):
        x, experts = function(weights, x)
        return mpmd.mark_stage_end(x, every=2), experts

    return jax.lax.scan(body, x, params)


def routes_of_passes(
    route, layers=in_turn, checkpoint=jax.checkpoint, keep=True, wrapped=None, gradients_of="experts"
):
    """The experts that the forwards chose, and the experts with gradients of a weight, for each layer."""

    def loss(params, x):
        with mpmd.Remat.keep_choices(keep):
            x, routes = layers(checkpoint(lambda weights, x: layer(route, weights, x)), params, x)
        return jnp.mean(x**2), routes

    loss = wrapped(loss) if wrapped else loss

    def step(params, batch):
        def of_microbatch(x):
            (_, routes), gradients = jax.value_and_grad(loss, has_aux=True)(params, x)
            return routes, gradients

        return mpmd.treduce(
            of_microbatch, batch, schedule=mpmd.Std1F1B(2), operation=(mpmd.Concat(), mpmd.Add)
        )

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "router": jax.random.normal(keys[0], (4, WIDTH, EXPERTS)) / 32,
        "experts": jax.random.normal(keys[1], (4, EXPERTS, WIDTH)),
    }
    batch = jax.random.normal(keys[2], (MICROBATCHES, TOKENS, WIDTH))
    compiled = mpmd.jit(step, mesh_of(2))
    routes, gradients = compiled(params, batch)
    routes = np.asarray(routes)
    forward = [set(routes[:, i].ravel().tolist()) for i in range(4)]
    axis = {"experts": -1, "router": 0}[gradients_of]
    by_layer = np.asarray(gradients[gradients_of])
    backward = [set(np.flatnonzero(gradient.any(axis)).tolist()) for gradient in by_layer]
    return forward, backward, compiled.only_step


def output_bytes(step, task):
    return next(each.output_bytes for each in mpmd.explain(step).tasks if each.task == task)


ROUTES = [top_k, sorted_experts, argmax_under_jit, rounded_position, predicates]


@pytest.mark.parametrize("route", ROUTES)
def test_backwards_take_the_routes_of_forwards(route):
    forward, backward, _ = routes_of_passes(route)
    assert forward == backward


def test_routes_in_a_scan_of_layers():
    forward, backward, _ = routes_of_passes(top_k, scanned)
    assert forward == backward


def test_gates_have_their_gradients_from_the_routes_of_forwards():
    forward, backward, _ = routes_of_passes(sorted_experts, gradients_of="router")
    assert forward == backward


def under_checkpoint_twice(function):
    inner = jax.checkpoint(function)
    return jax.checkpoint(lambda weights, x: inner(weights, x))


def with_constants_under_jit(function):
    ones = np.ones((EXPERTS, WIDTH), np.float32)
    jitted = jax.jit(lambda weights, x: function({**weights, "experts": ones * weights["experts"]}, x))
    return jax.checkpoint(lambda weights, x: jitted(weights, x))


@pytest.mark.parametrize("checkpoint", [under_checkpoint_twice, with_constants_under_jit])
def test_routes_in_functions_within_a_checkpoint(checkpoint):
    forward, backward, _ = routes_of_passes(top_k, checkpoint=checkpoint)
    assert forward == backward


def test_routes_without_kept_choices():
    """The test's executables differ: without kept choices the routes of forwards and backwards do."""
    forward, backward, _ = routes_of_passes(top_k, keep=False)
    assert forward != backward


def test_routes_of_layers_that_a_plan_rematerialises():
    unmarked = functools.partial(in_turn, ends=())

    def found(loss):
        return decided(mpmd.auto_marks(loss, 2), Decisions(remat=(mpmd.Remat.NOTHING_SAVEABLE,)))

    forward, backward, _ = routes_of_passes(top_k, unmarked, lambda layer: layer, wrapped=found)
    assert forward == backward


def test_explanation_names_kept_choices():
    *_, compiled = routes_of_passes(top_k)
    *_, without = routes_of_passes(top_k, keep=False)
    assert output_bytes(compiled, "fwd_0") - output_bytes(without, "fwd_0") == 16
    text = str(mpmd.explain(compiled))
    assert "fwd_0 keeps 16 B of discrete choices" in text and "test_choices.py" in text


def test_explanation_names_choices_that_are_too_large():
    def of_many(logits):
        experts = jnp.argsort(jnp.concatenate([logits] * 8, axis=1))[:, 0] % EXPERTS
        return jnp.ones((TOKENS, 1)), experts

    *_, compiled = routes_of_passes(of_many)
    assert "the backward of fwd_0 makes 1.0 KiB of discrete choices again" in str(mpmd.explain(compiled))
