"""Llama 3 with its layers in a scan, as training codes write it; compiled, and never run.

Its stages are unlike: they may have different numbers of layers, the first has the embedding, the last the
head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd
from benchmarks.chain import updated

MICROBATCHES, ROWS = 8, 4


def llama3(layers: int, num_stages: int) -> tuple[Callable, tuple]:
    """A step of ``(state, batch)`` with 1F1B and clipped AdamW, and the shapes of its arguments.

    The model has bfloat16 products, grouped queries, rotary positions, and layers that keep only products.
    """
    width, heads, kv_heads, positions, vocabulary = 512, 8, 2, 512, 32_000
    size = width // heads

    def normal(key, *shape):
        return jax.random.normal(key, shape) * 0.02

    def rms_norm(x, scale):
        y = x.astype(jnp.float32)
        return (y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

    def init_layer(key):
        keys = jax.random.split(key, 7)
        return {
            "input_norm": jnp.ones(width),
            "q": normal(keys[0], width, heads, size),
            "k": normal(keys[1], width, kv_heads, size),
            "v": normal(keys[2], width, kv_heads, size),
            "o": normal(keys[3], heads, size, width),
            "post_norm": jnp.ones(width),
            "gate": normal(keys[4], width, 3 * width),
            "up": normal(keys[5], width, 3 * width),
            "down": normal(keys[6], 3 * width, width),
        }

    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "embedder": normal(keys[0], vocabulary, width),
            "layers": jax.vmap(init_layer)(jax.random.split(keys[1], layers)),
            "final_norm": jnp.ones(width),
            "lm_head": normal(keys[2], width, vocabulary),
        }

    def rope(x, at):
        frequencies = 500_000.0 ** (-jnp.arange(0, size, 2) / size)
        angles = (at[..., None] * frequencies)[:, :, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def block(x, layer, at, mask):
        h = rms_norm(x, layer["input_norm"])
        q, k, v = (jnp.einsum("btd,dhe->bthe", h, layer[name]) for name in "qkv")
        k, v = (jnp.repeat(part, heads // kv_heads, 2) for part in (rope(k, at), v))
        x = x + jnp.einsum("bthe,hed->btd", attention(rope(q, at), k, v, mask), layer["o"])
        h = rms_norm(x, layer["post_norm"])
        return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]

    def attention(q, k, v, mask):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * size**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
        return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)

    def loss(params, batch):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        at = jnp.cumsum(batch["mask"], -1) - 1
        mask = jnp.tril(jnp.ones((positions, positions), bool)) & (batch["mask"] > 0)[:, None, None, :]
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

        def body(x, layer):
            x = jax.checkpoint(block, policy=policy)(x, layer, at, mask)
            return mpmd.mark_stage_end(x, num_stages=num_stages), None

        x, _ = lax.scan(body, params["embedder"][batch["inputs"]], params["layers"])
        logits = (rms_norm(x, params["final_norm"]) @ params["lm_head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(losses * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)

    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10_000)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))

    def step(state, batch):
        value, gradients = mpmd.treduce(
            lambda microbatch: jax.value_and_grad(loss)(state[0], microbatch),
            batch,
            schedule=mpmd.Std1F1B(num_stages),
            operation=mpmd.Mean,
        )
        return updated(optimizer, state, gradients), value

    params = jax.eval_shape(init, jax.random.key(0))
    shape = (MICROBATCHES, ROWS, positions)
    tokens, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = {"inputs": tokens, "targets": tokens, "mask": mask}
    return step, ((params, jax.eval_shape(optimizer.init, params)), batch)
