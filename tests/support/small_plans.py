"""Small steps, one of which is only planned, on groups of any shape."""

import jax
import jax.numpy as jnp

import mpmd

WIDTH, ROWS, MICROBATCHES = 8, 4, 3


def step_of(schedule, calls_python=False):
    def loss_of(weights, x):
        for weight in weights[:-1]:
            x = mpmd.mark_stage_end(jnp.tanh(x @ weight))
        if calls_python:
            x = x + jax.pure_callback(lambda x: x, x, jax.lax.stop_gradient(x), vmap_method="sequential")
        return ((x @ weights[-1]) ** 2).mean()

    def step(weights, xs):
        grads, loss = mpmd.treduce(
            lambda x: jax.value_and_grad(loss_of)(weights, x)[::-1], xs, schedule=schedule, operation=mpmd.Add
        )
        return jax.tree.map(lambda weight, grad: weight - grad, weights, grads), loss

    return step


def stacked_step(num_stages):
    """A train step of the stacked weights of layers, which it scans over."""

    def loss(weights, x):
        def layer(x, weight):
            return mpmd.mark_stage_end(jnp.tanh(x @ weight), num_stages=num_stages), None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    def step(weights, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            schedule=mpmd.Std1F1B(num_stages),
            operation=mpmd.Mean,
        )
        return weights - grads, value

    return step


def lowered(schedule, submeshes, calls_python=False, **options):
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * schedule.num_stages
    xs = jax.ShapeDtypeStruct((MICROBATCHES, ROWS, WIDTH), jnp.float32)
    mesh = mpmd.AbstractMpmdMesh(submeshes)
    return mpmd.jit(step_of(schedule, calls_python), mesh, donate_argnums=0, **options).lower(weights, xs)
