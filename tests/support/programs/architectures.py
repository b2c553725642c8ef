"""Small models of the field: attention, experts, adapters, and networks with skips."""

import jax
import jax.numpy as jnp
import optax

import mpmd
from tests.support.models import WIDTH, batch, keys, layer, mlp, weights
from tests.support.programs.table import Case, descend, program, train, trains

TOKENS, MODEL, HEADS, VOCABULARY = 6, 8, 2, 7


def matrices(key, **shapes):
    subs = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(subs, shapes.items(), strict=True)
    }


def rotated(x, start=0):
    """Rotary embeddings of (batch, tokens, heads, width) from the position ``start`` on."""
    half = x.shape[-1] // 2
    angles = (start + jnp.arange(x.shape[1]))[:, None] / 10 ** (jnp.arange(half) / half)
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
def transformer_with_rotary_embeddings_and_causal_mask():
    def loss(params, tokens, targets):
        mask = causal()
        h = mlp(params["blocks"], params["table"][tokens], lambda p, h: block(p, h, mask))
        return word_loss(params, h, targets)

    def holds(loaded):
        activation = 2 * TOKENS * MODEL * 4
        table, microbatches = VOCABULARY * MODEL * 4, 3
        sent = [group.sent_bytes for group in loaded.report().groups]
        # The tied table's gradient comes to group 0, and the new table goes to group 2.
        expected = [microbatches * activation, 2 * microbatches * activation, microbatches * activation]
        expected = [expected[0] + table, expected[1], expected[2] + table]
        assert sent == expected, f"sends {sent} bytes, not {expected}"

    return train(loss, transformer(), data=token_batches(), holds=holds)


@program()
def low_rank_adapters_of_some_stages():
    def step(state, xs, ys):
        adapters, base = state

        def loss(adapters, x, y):
            h = x
            for i, p in enumerate(base):
                w = p["w"] + adapters[i]["a"] @ adapters[i]["b"] if i in adapters else p["w"]
                h = jnp.tanh(h @ w + p["b"])
                if i < 2:
                    h = mpmd.mark_stage_end(h)
            return jnp.mean((h - y) ** 2)

        total, grads = trains(adapters, (xs, ys), loss)
        return (descend(adapters, grads), base), (total, grads)

    def holds(loaded):
        homes = {leaf.path: leaf.mpmd_idxs for leaf in loaded.plan.inputs}
        assert [homes[f"args[0][1][{i}]['w']"] for i in range(3)] == [(0,), (1,), (2,)]
        assert [homes[f"args[0][0][{i}]['a']"] for i in (1, 2)] == [(1,), (2,)]

    adapters = {i: matrices(keys(3)[i], a=(WIDTH, 2), b=(2, WIDTH)) for i in (1, 2)}
    return Case(step, (adapters, weights(3)), batch(), holds=holds)


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
