"""A state with all kinds of leaves, and its train step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P

import mpmd

WIDTH, VOCABULARY = 4, 8
SGD = optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9))


def initial_state():
    """A tied embedding, weights of two dtypes, empty optimizer states, a key and a count."""
    numbers = np.random.default_rng(0)
    layers = [
        jnp.asarray(numbers.normal(size=WIDTH), jnp.bfloat16 if i % 2 else jnp.float32) for i in range(4)
    ]
    embedding = jnp.asarray(numbers.normal(size=(VOCABULARY, WIDTH)), jnp.float32)
    params = {"embedding": embedding, "layers": layers}
    return {"params": params, "optimizer": SGD.init(params), "key": jax.random.key(7), "count": 0}


def tokens():
    return np.random.default_rng(1).integers(0, VOCABULARY, (4, 2, 3))


def step_of(schedule):
    """A step of the state, for a schedule of 1, 2 or 4 stages."""
    every = 4 // schedule.num_stages

    def loss_of(params, xs):
        h = params["embedding"][xs]
        for i, layer in enumerate(params["layers"]):
            h = jnp.tanh(h + layer.astype(jnp.float32))
            if (i + 1) % every == 0 and i < 3:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h @ params["embedding"].T) ** 2)

    def step(state, xs):
        loss, gradients = mpmd.treduce(
            lambda x: jax.value_and_grad(loss_of)(state["params"], x),
            xs,
            schedule=schedule,
            operation=mpmd.Add,
        )
        updates, optimizer = SGD.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        key = jax.random.split(state["key"])[0]
        return {"params": params, "optimizer": optimizer, "key": key, "count": state["count"] + 1}, loss

    return step


def compiled(mesh, schedule, sharded=False):
    """The step for a mesh; ``sharded``: with matrices over the axis ``fsdp`` of the groups."""
    state = initial_state()
    specs = jax.tree.map(lambda leaf: P("fsdp") if sharded and np.ndim(leaf) == 2 else P(), state)
    jitted = mpmd.jit(step_of(schedule), mesh, in_specs=(specs, P()), donate_argnums=0)
    return jitted.compile(state, tokens())


def save_plain(path, tree):
    """Saves a tree by Orbax alone."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
