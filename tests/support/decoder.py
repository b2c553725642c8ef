"""A decoder over explicit mesh axes, in the style of gemma's codes: ``fsdp`` by ``tensor`` within a stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.parity import assert_close

AXES = ("fsdp", "tensor")
EXPLICIT = AxisType.Explicit
VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN = 16, 8, 2, 4, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))

LAYER = {
    "norm": ((WIDTH,), P()),
    "qkv": ((3, WIDTH, HEADS, HEAD), P(None, "fsdp", "tensor")),
    "out": ((HEADS, HEAD, WIDTH), P("tensor", None, "fsdp")),
    "gate": ((2, WIDTH, HIDDEN), P(None, "fsdp", "tensor")),
    "down": ((HIDDEN, WIDTH), P("tensor", "fsdp")),
}
"""Shapes and specs of a layer's weights: each is split along both axes."""


def submesh():
    """That of a group, of this process's devices."""
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES, axis_types=(EXPLICIT,) * 2)


def make_state(mesh, layers=2):
    """Sharded parameters, and an optimizer's state that is made of them, and so sharded like them."""
    numbers = np.random.default_rng(0)

    def make(shape, spec):
        value = numbers.normal(size=shape).astype(np.float32) / np.sqrt(shape[-1])
        return jax.device_put(value, NamedSharding(mesh, spec))

    params = {
        "table": make((VOCABULARY, WIDTH), P("tensor", "fsdp")),
        "layers": [{name: make(*of) for name, of in LAYER.items()} for _ in range(layers)],
    }
    with jax.set_mesh(mesh):
        return params, jax.jit(OPTIMIZER.init)(params)


def make_tokens():
    return np.random.default_rng(1).integers(0, VOCABULARY, size=(4, 4, 5))


def gathered(w, *spec):
    """A weight as a task reads it: gathered along ``fsdp``, still split along ``tensor``."""
    return reshard(w, P(*spec))


def normalised(h, scale):
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * (1 + scale)


def rotated(x):
    """Rotary embeddings of (rows, length, heads, head)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 10 ** (jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    parts = first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)
    return jnp.concatenate(parts, -1)


def attention(p, h):
    """Heads are split along ``tensor``; the sum over them is reduced where the rows are."""
    rows, heads = P("fsdp"), P("fsdp", None, "tensor")
    wq, wk, wv = gathered(p["qkv"], None, None, "tensor")
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, w, out_sharding=heads) for w in (wq, wk, wv))
    q, k = rotated(q), rotated(k)
    assert jax.typeof(q).sharding.spec == P("fsdp", None, "tensor", None)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / HEAD**0.5
    mask = jnp.tri(h.shape[1], dtype=bool)
    probabilities = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bnts,bsnh->btnh", probabilities, v)
    return jnp.einsum("btnh,nhd->btd", mixed, gathered(p["out"], "tensor"), out_sharding=rows)


def feed_forward(p, h):
    gate, up = gathered(p["gate"], None, None, "tensor")
    hidden = jax.nn.gelu(h @ gate) * (h @ up)
    assert jax.typeof(hidden).sharding.spec == P("fsdp", None, "tensor")
    return jnp.einsum("btf,fd->btd", hidden, gathered(p["down"], "tensor"), out_sharding=P("fsdp"))


@jax.checkpoint
def block(p, h):
    h = h + attention(p, normalised(h, p["norm"]))
    return h + feed_forward(p, normalised(h, p["norm"]))


def loss_fn(params, tokens):
    """The table is shared by the first and the last stage, and split by its rows along ``tensor``."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    h = gathered(params["table"]).at[inputs].get(out_sharding=P("fsdp"))
    for i, p in enumerate(params["layers"]):
        h = block(p, h)
        if i < len(params["layers"]) - 1:
            h = mpmd.mark_stage_end(h)
    logits = jnp.einsum("btd,vd->btv", h, gathered(params["table"], "tensor"))
    chances = jax.nn.log_softmax(reshard(logits, P("fsdp")))
    return -jnp.mean(jnp.take_along_axis(chances, targets[..., None], -1))


def train_step(state, batch):
    params, opt_state = state
    loss, grads = mpmd.treduce(
        lambda tokens: jax.value_and_grad(loss_fn)(params, tokens),
        batch,
        schedule=mpmd.Std1F1B(2),
        operation=mpmd.Mean,
    )
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), (loss, optax.tree.norm(grads))


def assert_trains_as_under_jit(mesh, steps=3):
    """Three steps on the groups of ``mesh``, and on the devices of one group under ``jax.jit``."""
    own = submesh()
    state = expected = make_state(own)
    tokens = jax.device_put(make_tokens(), NamedSharding(own, P(None, "fsdp")))
    step, reference = mpmd.jit(train_step, mesh), jax.jit(train_step)
    for _ in range(steps):
        with jax.set_mesh(own):
            expected, wanted = reference(expected, tokens)
        state, result = step(state, tokens)
        assert_close(result, wanted)
    assert_close(state, expected)
    for name, (_, spec) in LAYER.items():
        assert state[0]["layers"][1][name].spec == spec, name
        assert state[1][1][0].mu["layers"][1][name].spec == spec, name
    return step.compile(state, tokens)
