"""What stages read besides activations: labels, masks, constants, and microbatches of all kinds."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from tests.support.models import BATCH, MICROBATCHES, WIDTH, batch, keys, layer, mse, weights
from tests.support.programs.stages import sends_nothing_but_activations
from tests.support.programs.table import Case, descend, loop, program, train


@program()
def labels_read_by_every_stage():
    """Deep supervision, with a loss for every stage."""

    def loss(params, x, y):
        h, total = x, 0.0
        for i, stage in enumerate(params):
            h = layer(stage, h)
            total += jnp.mean((h - y) ** 2) * (i + 1)
            if i < 2:
                h, total = mpmd.mark_stage_end((h, total))
        return total

    return train(loss, weights(3))


@program(usual=True)
def masks_and_positions():
    def loss(params, x, y):
        mask = jnp.tril(jnp.ones((BATCH, BATCH))) > 0
        positions = jnp.arange(WIDTH) / WIDTH
        h = x
        for i, stage in enumerate(params):
            h = jnp.where(mask, 1.0, 0.0) @ layer(stage, h + positions)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h - y) ** 2)

    return train(loss, weights(3), holds=sends_nothing_but_activations)


@program()
def masks_and_positions_of_the_microbatch():
    """Made from integers of the batch: every group has these and makes its own."""

    def loss(params, x, y):
        tokens, y = y
        mask = (tokens > 1)[:, None]
        positions = jnp.cumsum(tokens > 0, -1)[:, None] / BATCH
        h = x
        for i, stage in enumerate(params):
            h = jnp.where(mask, layer(stage, h + positions), h)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jnp.sum(jnp.mean((h - y) ** 2, -1) * (tokens > 0))

    xs, ys = batch()
    tokens = jax.random.randint(keys(1)[0], (MICROBATCHES, BATCH), 0, 4)
    return train(loss, weights(3), data=(xs, (tokens, ys)), holds=sends_nothing_but_activations)


@program()
def the_microbatch_index_in_every_stage():
    def step(state, xs, ys):
        def loss(params, i):
            h = xs[i]
            for n, stage in enumerate(params):
                h = layer(stage, h) * (1 + i) / (n + 1) + jnp.where(i % 2 == 0, 0.1, -0.1)
                if n < 2:
                    h = mpmd.mark_stage_end(h)
            return jnp.mean((h - ys[i]) ** 2)

        total, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(state, i), len(xs), mpmd.Std1F1B(3), mpmd.Add
        )
        return descend(state, grads, 0.01), (total, grads)

    return Case(step, weights(3), batch(), holds=sends_nothing_but_activations)


@program({"numpy": np.asarray, "jax": jnp.asarray}, on_ray={"numpy"})
def constants_from_outside(convert):
    table = convert(np.linspace(-1, 1, WIDTH * WIDTH, dtype="float32").reshape(WIDTH, WIDTH))

    def loss(params, x, y):
        h = x
        for i, stage in enumerate(params):
            h = layer(stage, h @ table)
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h - y) ** 2)

    return train(loss, weights(3), holds=sends_nothing_but_activations)


@program()
def gradients_of_the_inputs():
    def step(state, xs, ys):
        total, (grads, inputs) = loop(
            lambda x, y: jax.value_and_grad(mse, argnums=(0, 1))(state, x, y),
            (xs, ys),
            operation=(mpmd.Add, (mpmd.Add, mpmd.Concat())),
        )
        return descend(state, grads), (total, inputs)

    return Case(step, weights(3), batch())


@program([1, -1, 2], usual={"1"})
def microbatches_along_another_axis(axis):
    def step(state, xs, ys):
        total, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(mse)(state, *mb), (xs, ys), mpmd.Std1F1B(3), axis, mpmd.Add
        )
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), tuple(jnp.moveaxis(leaf, 0, axis) for leaf in batch()))


@program()
def the_default_operation_stacks_losses_and_adds_gradients():
    def step(state, xs, ys):
        losses, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(mse)(state, *mb), (xs, ys), schedule=mpmd.Std1F1B(3)
        )
        return descend(state, grads), (losses, grads)

    return Case(step, weights(3), batch())


@program()
def batches_reshaped_into_microbatches():
    def step(state, xs, ys):
        split = [a.reshape(2, BATCH // 2, WIDTH) for a in (xs, ys)]
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), split)
        return descend(state, grads), (total / 2, grads)

    return Case(step, weights(3), tuple(leaf[0] for leaf in batch()))


@program()
def the_batch_is_normalised_before_the_loop():
    def step(state, xs, ys):
        xs = (xs - xs.mean((0, 1))) / (xs.std((0, 1)) + 1e-5)
        total, grads = loop(lambda x, y: jax.value_and_grad(mse)(state, x, y), (xs, ys))
        return descend(state, grads), (total, grads)

    return Case(step, weights(3), batch())
