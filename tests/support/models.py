"""A small model in stages, and train steps of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import mpmd

WIDTH, BATCH, MICROBATCHES = 4, 4, 4
ROW_SPECS = P(), P(None, "data"), P(None, "data")
"""Of a step's state, replicated, and of two arrays (microbatches, rows, ...), sharded over the rows."""
SGD = optax.sgd(0.1)
CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def keys(count):
    return list(jax.random.split(jax.random.key(0), count))


def weights(stages, dtype=jnp.float32):
    return [
        {"w": jax.random.normal(key, (WIDTH, WIDTH), dtype) / 2, "b": jnp.full(WIDTH, 0.1, dtype)}
        for key in keys(stages)
    ]


def stack(layers):
    """Pytrees of layers as one, whose arrays have a row for each layer."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def rows(stacked, index):
    """Some layers of a stack, by a number or a slice."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def batch(microbatches=MICROBATCHES):
    x, y = keys(2)
    shape = (microbatches, BATCH, WIDTH)
    return jax.random.normal(x, shape), jax.random.normal(y, shape)


def drawn(init, *args):
    """Numbers for the arrays that ``init`` makes: initialisers of libraries take long to compile."""
    return drawn_like(jax.eval_shape(init, *args))


def drawn_like(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) / 2).astype(leaf.dtype), shapes)


def layer(params, h):
    return jnp.tanh(h @ params["w"] + params["b"])


def mlp(params, x, layer=layer):
    """Applies ``layer(p, h)`` with each of ``params``, and marks the end of a stage between two of them."""
    h = x
    for i, stage in enumerate(params):
        h = layer(stage, h)
        if i < len(params) - 1:
            h = mpmd.mark_stage_end(h)
    return h


def unmarked(params, h):
    """Applies all layers."""
    for p in params:
        h = layer(p, h)
    return h


def mse_of(layers, params, x, y):
    """That of a model whose stages are different functions."""
    return mse(list(zip(layers, params, strict=True)), x, y, lambda own, h: own[0](own[1], h))


def squares(h, y):
    return jnp.mean((h - y) ** 2)


def mse(params, x, y, layer=layer):
    return squares(mlp(params, x, layer), y)


def descend(params, grads, rate=0.1):
    """A step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def sgd_step(loss_fn, schedule, operation=mpmd.Add):
    """``params, *batch`` to the parameters after a step of gradient descent, and the loss."""

    def step(params, *batch):
        loss, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss_fn)(params, *mb), batch, schedule=schedule, operation=operation
        )
        return descend(params, grads), loss

    return step


class FromZeros:
    """An operation of a user's own, of which ``update`` is missing."""

    def state(self, n, a):
        return jnp.zeros(a.shape, a.dtype)


class Last(FromZeros):
    """Keeps the last microbatch's value."""

    def update(self, state, update, index):
        return update


def make_step(loss_fn, schedule, optimizer=SGD, operation=mpmd.Add):
    """``(params, optimizer state), xs, ys`` to the same and the loss and gradients."""

    def step(state, xs, ys):
        params, opt_state = state
        loss, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss_fn)(params, *mb),
            (xs, ys),
            schedule=schedule,
            operation=operation,
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, grads)

    return step


def shrink(state, xs, ys, rate=0.1):
    """A step without gradients, which compiles quickly: for tests that are not about what it computes."""
    schedule = mpmd.ForwardOnly(len(state), len(state))
    loss = mpmd.treduce(lambda mb: mse(state, *mb), (xs, ys), schedule, operation=mpmd.Add)
    return jax.tree.map(lambda leaf: leaf - rate * loss * leaf, state), loss


def init(params, optimizer=SGD):
    return params, optimizer.init(params)


def planned(step, *args, groups=2, axes=None, **options):
    """The step, planned without devices for groups that have these axes, or one device each."""
    mesh = mpmd.AbstractMpmdMesh({"stage": groups, **(axes or {})}, "stage")
    return mpmd.jit(step, mesh, **options).lower(*args)


def too_much(x):
    """A number that takes more memory than there is: a loop carries an array, so it has to be there.

    XLA of JAX 0.11.1 to 0.12.0 ends the process where the sizes are powers of two.
    """
    return jax.lax.while_loop(lambda y: y[7, 7] < 0, jnp.sin, jnp.zeros((10**7, 10**7)) + x)[7, 7]
