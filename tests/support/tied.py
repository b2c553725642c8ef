"""A model with a tied weight, a train step of it and the function that makes its state."""

import jax
import jax.numpy as jnp
import optax

import mpmd

GROUPS, WIDTH, TOKENS = 3, 8, 16
OPTIMIZER = optax.adamw(1e-2)


def logits(params, tokens):
    h = params["embedding"][tokens]
    for i, layer in enumerate(params["layers"]):
        h = jnp.tanh(h @ layer["w"] + layer["b"]) * params["temperature"]
        if i < len(params["layers"]) - 1:
            h = mpmd.mark_stage_end(h)
    return h @ params["embedding"].T


def loss_fn(params, tokens, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens), targets).mean()


def train_step(state, tokens, targets):
    loss, grads = mpmd.treduce(
        lambda mb: jax.value_and_grad(loss_fn)(state["params"], *mb),
        (tokens, targets),
        schedule=mpmd.Std1F1B(GROUPS),
        operation=mpmd.Add,
    )
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer, "key": jax.random.fold_in(state["key"], 1)}, loss


def init_fn(key):
    """The state: an embedding of the first and the last stage, a scalar of all, and layers of one each."""
    keys = iter(jax.random.split(key, 2 + 3 * GROUPS))
    normal, truncated = jax.random.normal, jax.nn.initializers.truncated_normal(0.02)
    params = {
        "embedding": normal(next(keys), (TOKENS, WIDTH)) * WIDTH**-0.5,
        "temperature": jax.random.uniform(next(keys), ()),
        "layers": [
            {
                "w": jax.nn.initializers.orthogonal()(next(keys), (WIDTH, WIDTH)),
                "b": truncated(next(keys), (WIDTH,)),
            }
            for _ in range(GROUPS)
        ],
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params), "key": jax.random.fold_in(key, 7)}


def state_shapes():
    return jax.eval_shape(init_fn, jax.random.key(0))


def batch_shapes():
    return (jax.ShapeDtypeStruct((2, 4, 3), jnp.int32),) * 2


def tokens():
    return (jnp.arange(24).reshape(2, 4, 3) % TOKENS,) * 2
