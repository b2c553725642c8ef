"""Small models of the field: blocks of a transformer, a model that prunes its tokens, and diffusion."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.models import BATCH, MICROBATCHES, WIDTH, batch, keys, layer, weights
from tests.support.programs.table import Case, descend, loop, program, train

TOKENS, MODEL, HEADS, VOCABULARY = 6, 8, 2, 7


def matrices(key, **shapes):
    subs = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(subs, shapes.items(), strict=True)
    }


def rotated(x):
    """Rotary embeddings of (batch, tokens, heads, width)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(params, h, mask):
    def heads(name):
        return jnp.einsum("btd,dk->btk", h, params[name]).reshape(*h.shape[:2], HEADS, -1)

    q, k, v = rotated(heads("q")), rotated(heads("k")), heads("v")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return out.reshape(h.shape) @ params["o"]


def normalised(h):
    return h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


def block(params, h, mask):
    h = h + attention(params, normalised(h), mask)
    gate, up = jnp.split(normalised(h) @ params["in"], 2, -1)
    return h + (jax.nn.silu(gate) * up) @ params["out"]


SHAPES = dict.fromkeys("qkvo", (MODEL, MODEL)) | {"in": (MODEL, 2 * MODEL), "out": (MODEL, MODEL)}


def transformer(stages=3):
    first, *rest = keys(stages + 1)
    return {
        "table": jax.random.normal(first, (VOCABULARY, MODEL)) / 2,
        "blocks": [matrices(k, **SHAPES) for k in rest],
    }


def token_batches(microbatches=3):
    """Tokens and those that follow them."""
    tokens = jax.random.randint(keys(1)[0], (microbatches, 2, TOKENS + 1), 0, VOCABULARY)
    return tokens[..., :-1], tokens[..., 1:]


def causal():
    return jnp.tri(TOKENS, dtype=bool)


def word_loss(params, h, targets):
    logits = normalised(h) @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@program()
def tokens_pruned_between_stages():
    """Later stages see only the rows that an earlier one chose."""

    def loss(params, x, y):
        h = layer(params[0], x)
        kept = jax.lax.top_k(jnp.linalg.norm(h, axis=-1), 2)[1]
        h, kept = mpmd.mark_stage_end((h[kept], kept))
        h = mpmd.mark_stage_end(layer(params[1], h))
        return jnp.mean((layer(params[2], h) - y[kept]) ** 2)

    def holds(loaded):
        (labels,) = loaded.plan.inputs[-1].mpmd_idxs
        assert labels > 0, "the labels are where the rows are chosen, not behind"

    return train(loss, weights(3), holds=holds)


@program()
def diffusion():
    """Times and noise are drawn before the loop, and read by the first and the last stage."""

    def step(state, xs, ys):
        params, key = state
        key, times_key, noise_key = jax.random.split(key, 3)
        times = jax.random.uniform(times_key, (MICROBATCHES, BATCH, 1))
        noise = jax.random.normal(noise_key, xs.shape)

        def loss(params, x, t, e):
            h = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * e
            for i, stage in enumerate(params):
                h = layer(stage, h + jnp.sin(t * jnp.arange(1, WIDTH + 1)))
                if i < 2:
                    h = mpmd.mark_stage_end(h)
            return jnp.mean((h - e) ** 2)

        total, grads = loop(lambda *mb: jax.value_and_grad(loss)(params, *mb), (xs, times, noise))
        return (descend(params, grads), key), (total, grads)

    return Case(step, (weights(3), jax.random.key(0)), batch())
