"""Train steps to choose for, which say more or less themselves, and a cluster like this process's devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd
from mpmd.simulate import Link

WIDTH, ROWS, LAYERS = 16, 16, 4
ADAM = optax.adam(1e-2)

CLUSTER = mpmd.Cluster(
    nodes=1,
    devices_per_node=8,
    memory=1e9,
    flops=1e9,
    memory_bandwidth=1e9,
    device_link=Link(1e-7, 1e10),
    node_link=Link(1e-6, 1e9),
)
"""Slow devices with fast links: to divide the work pays."""


def params_of(num_layers=LAYERS):
    """Layers of a matrix up and a matrix down, with biases."""
    numbers = np.random.default_rng(0)
    return [
        {
            "up": jnp.asarray(numbers.normal(size=(WIDTH, 2 * WIDTH)) / 4, jnp.float32),
            "bias": jnp.zeros(2 * WIDTH),
            "down": jnp.asarray(numbers.normal(size=(2 * WIDTH, WIDTH)) / 6, jnp.float32),
        }
        for _ in range(num_layers)
    ]


def batch(rows=ROWS):
    numbers = np.random.default_rng(1)
    return [numbers.normal(size=(rows, WIDTH)).astype(np.float32) for _ in range(2)]


def layer_of(layer, x):
    return x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]


def loss_of(params, x, y):
    for layer in params:
        x = layer_of(layer, x)
    return jnp.mean((x - y) ** 2)


def updated(params, state, grads):
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def open_step(params, state, x, y):
    """Leaves everything open."""
    loss, grads = mpmd.value_and_grad(loss_of)(params, x, y)
    return *updated(params, state, grads), loss


def marked_step(params, state, x, y):
    """Says its stages and its schedule, and takes a batch that is cut into microbatches."""

    def marked_loss(params, x, y):
        for i, layer in enumerate(params):
            x = layer_of(layer, x)
            if i < len(params) - 1:
                x = mpmd.mark_stage_end(x)
        return jnp.mean((x - y) ** 2)

    def of_microbatch(microbatch):
        return jax.value_and_grad(marked_loss)(params, *microbatch)

    loss, grads = mpmd.treduce(of_microbatch, (x, y), mpmd.Std1F1B(LAYERS), operation=mpmd.Mean)
    return *updated(params, state, grads), loss


def arguments(cut=False, num_layers=LAYERS):
    """The arguments of one of these steps; ``cut``: with a batch of four microbatches."""
    params = params_of(num_layers)
    x, y = mpmd.microbatches(batch(), 4) if cut else batch()
    return params, ADAM.init(params), x, y


def adversarial_step(generator, discriminator, x, z):
    """Two loops, whose stages and microbatches are open; the second reads what the first has updated."""

    def judged(params, x):
        for layer in params:
            x = layer_of(layer, x)
        return x.mean(-1)

    def of_discriminator(params, x, fake):
        return jnp.mean(jax.nn.softplus(-judged(params, x)) + jax.nn.softplus(judged(params, fake)))

    fake = jax.lax.stop_gradient(z @ generator["first"])
    lost, grads = mpmd.value_and_grad(of_discriminator)(discriminator, x, fake)
    discriminator = jax.tree.map(lambda p, g: p - 0.1 * g, discriminator, grads)

    def of_generator(generator, z):
        made = jnp.tanh(z @ generator["first"]) @ generator["second"]
        return jnp.mean(jax.nn.softplus(-judged(discriminator, made)))

    fooled, grads = mpmd.value_and_grad(of_generator)(generator, z)
    generator = jax.tree.map(lambda p, g: p - 0.1 * g, generator, grads)
    return generator, discriminator, lost + fooled


def adversarial_arguments():
    first, second = (jnp.eye(WIDTH) + 0.1 * i for i in range(2))
    return {"first": first, "second": second}, params_of(2), *batch()


def step_without_a_loop(params, state, x, y):
    """A whole step of one batch: how its devices share it is all that is open."""
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    params, state = updated(params, state, grads)
    return params, state, loss
