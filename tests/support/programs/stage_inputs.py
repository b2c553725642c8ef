"""What stages read besides activations: labels, masks, constants, and microbatches of all kinds."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from tests.support.models import BATCH, MICROBATCHES, WIDTH, batch, keys, layer, mlp, mse, weights
from tests.support.programs.stages import sends_nothing_but_activations
from tests.support.programs.table import Case, descend, program, train


@program()
def masks_and_positions_of_the_microbatch():
    """Made from integers of the batch: every group has these and makes its own."""

    def loss(params, x, y):
        tokens, y = y
        mask = (tokens > 1)[:, None]
        positions = jnp.cumsum(tokens > 0, -1)[:, None] / BATCH
        h = mlp(params, x, lambda p, h: jnp.where(mask, layer(p, h + positions), h))
        return jnp.sum(jnp.mean((h - y) ** 2, -1) * (tokens > 0))

    xs, ys = batch()
    tokens = jax.random.randint(keys(1)[0], (MICROBATCHES, BATCH), 0, 4)
    return train(loss, weights(3), data=(xs, (tokens, ys)), holds=sends_nothing_but_activations)


@program({"numpy": np.asarray, "jax": jnp.asarray})
def constants_from_outside(convert):
    table = convert(np.linspace(-1, 1, WIDTH * WIDTH, dtype="float32").reshape(WIDTH, WIDTH))

    def loss(params, x, y):
        return mse(params, x, y, lambda stage, h: layer(stage, h @ table))

    return train(loss, weights(3), holds=sends_nothing_but_activations)


@program()
def the_default_operation_stacks_losses_and_adds_gradients():
    def step(state, xs, ys):
        losses, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(mse)(state, *mb), (xs, ys), schedule=mpmd.Std1F1B(3)
        )
        return descend(state, grads), (losses, grads)

    return Case(step, weights(3), batch())
