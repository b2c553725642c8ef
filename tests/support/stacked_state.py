"""A state of stacked layers, each with a weight in half precision, a key and a place, and its train step."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.models import CLIPPED_ADAM, WIDTH, batch, squares
from tests.support.programs.scanned_layers import scanned, stacked


def initial_state(layers=7):
    """Weights, one of which has the layers along its second axis, the optimizer's state and keys."""
    params = stacked(layers)
    params["layers"]["scale"] = jnp.ones((WIDTH, layers), jnp.bfloat16)
    return params, CLIPPED_ADAM.init(params), jax.random.split(jax.random.key(3), layers)


def step_of(schedule, **spread):
    """A step of the state; ``spread`` says where stages end."""

    def loss_of(params, keys, x, y, number):
        layers = {name: leaf for name, leaf in params["layers"].items() if name != "scale"}

        def body(h, inputs):
            p, scale, key = inputs
            h = jnp.tanh(h @ p["w"] + p["b"]) * scale.astype(jnp.float32)
            h = h * jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, h.shape)
            return mpmd.mark_stage_end(h, **spread)

        return squares(scanned(body, x, (layers, params["layers"]["scale"].T, keys)), y)

    def step(state, xs, ys):
        params, opt_state, keys = state
        loss, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss_of)(params, keys, *mb),
            (xs, ys, jnp.arange(len(xs))),
            schedule=schedule,
            operation=mpmd.Add,
        )
        updates, opt_state = CLIPPED_ADAM.update(grads, opt_state, params)
        keys = jax.vmap(lambda key: jax.random.split(key)[0])(keys)
        return (optax.apply_updates(params, updates), opt_state, keys), loss

    return step


def compiled(mesh, schedule, layers=7, **spread):
    """The step for a mesh; it takes its state over."""
    jitted = mpmd.jit(step_of(schedule, **spread), mesh, donate_argnums=0)
    return jitted.compile(initial_state(layers), *batch())
