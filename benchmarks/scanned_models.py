"""Train steps of models whose layers are in scans and whose stages are unlike, as training codes write them.

Stages have different numbers of layers, the first has embeddings, the last the head and the loss. Arguments
are ``ShapeDtypeStruct``s: the steps are compiled, and never run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

import mpmd

MICROBATCHES, ROWS = 8, 4
BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A train step of ``(state, batch)``, in ``num_stages`` stages, and its arguments."""

    fun: Callable
    args: tuple
    num_stages: int


def train_step(init, loss, batch, num_stages: int, optimizer, ema: float | None = None) -> TrainStep:
    """The usual step: gradients of microbatches, an optimizer, and perhaps averages of the weights.

    Args:
      init: makes the weights of a key.
      loss: of weights and a microbatch.
      batch: a microbatch's arrays, by shape.
    """

    def init_state(key):
        params = init(key)
        return {"params": params, "opt_state": optimizer.init(params)} | ({"ema": params} if ema else {})

    def step(state, batch):
        params = state["params"]
        value, gradients = mpmd.treduce(
            lambda microbatch: jax.value_and_grad(loss)(params, microbatch),
            batch,
            schedule=mpmd.Std1F1B(num_stages),
            operation=mpmd.Mean,
        )
        updates, opt_state = optimizer.update(gradients, state["opt_state"], params)
        new = {"params": optax.apply_updates(params, updates), "opt_state": opt_state}
        if ema:
            new["ema"] = optax.incremental_update(new["params"], state["ema"], 1 - ema)
        return new, {"loss": value, "gradient_norm": optax.global_norm(gradients)}

    batches = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((MICROBATCHES, *leaf.shape), leaf.dtype), batch)
    return TrainStep(step, (jax.eval_shape(init_state, jax.random.key(0)), batches), num_stages)


def adamw(**options):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10_000)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, **options))


def stacked(init_layer, key, layers: int):
    return jax.vmap(init_layer)(jax.random.split(key, layers))


def normal(key, *shape):
    return jax.random.normal(key, shape) * 0.02


def cast(tree):
    return jax.tree.map(lambda leaf: leaf.astype(BF16), tree)


def layer_norm(x, scale, bias):
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * scale + bias).astype(x.dtype)


def rms_norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def attention(q, k, v, mask=None, bias=0.0):
    """Causal attention of ``[rows, positions, heads, size]``; softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5 + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


def token_batch(positions: int):
    tokens = jax.ShapeDtypeStruct((ROWS, positions), jnp.int32)
    return {"inputs": tokens, "targets": tokens, "mask": jax.ShapeDtypeStruct(tokens.shape, jnp.float32)}


def masked_cross_entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"])
    return jnp.sum(losses * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


def gpt2(layers=10, num_stages=4, width=512, heads=8, positions=512, vocabulary=50_257) -> TrainStep:
    """GPT-2 with rematerialised layers, mixed precision, dropout and a tied head, as levanter has it."""

    def init_layer(key):
        keys = jax.random.split(key, 4)
        return {
            "ln_1": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
            "c_attn": {"w": normal(keys[0], width, 3 * width), "b": jnp.zeros(3 * width)},
            "c_proj": {"w": normal(keys[1], width, width), "b": jnp.zeros(width)},
            "ln_2": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
            "c_fc": {"w": normal(keys[2], width, 4 * width), "b": jnp.zeros(4 * width)},
            "mlp_proj": {"w": normal(keys[3], 4 * width, width), "b": jnp.zeros(width)},
        }

    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "wte": normal(keys[0], vocabulary, width),
            "wpe": normal(keys[1], positions, width),
            "h": stacked(init_layer, keys[2], layers),
            "ln_f": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        }

    def linear(p, x):
        return x @ p["w"] + p["b"]

    def dropout(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)

    def block(x, layer, key, mask):
        after_attention, after_mlp = jax.random.split(key)
        q, k, v = jnp.split(linear(layer["c_attn"], layer_norm(x, **layer["ln_1"])), 3, -1)
        q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in (q, k, v))
        h = linear(layer["c_proj"], attention(q, k, v, mask).reshape(x.shape))
        x = x + dropout(after_attention, h)
        h = jax.nn.gelu(linear(layer["c_fc"], layer_norm(x, **layer["ln_2"])))
        return x + dropout(after_mlp, linear(layer["mlp_proj"], h))

    def loss(params, batch):
        params, tokens = cast(params), batch["inputs"]
        mask = jnp.tril(jnp.ones((positions, positions), bool))
        at_embedding, *of_layers = jax.random.split(jax.random.wrap_key_data(batch["key"]), layers + 1)

        def body(x, layer_and_key):
            x = jax.checkpoint(block)(x, *layer_and_key, mask)
            return mpmd.mark_stage_end(x, num_stages=num_stages), None

        x = dropout(at_embedding, params["wte"][tokens] + params["wpe"])
        x, _ = lax.scan(body, x, (params["h"], jnp.stack(of_layers)))
        x = layer_norm(x, **params["ln_f"])
        return masked_cross_entropy(x @ params["wte"].T, batch)

    optimizer = adamw(weight_decay=0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params))
    batch = {**token_batch(positions), "key": jax.ShapeDtypeStruct((2,), jnp.uint32)}
    return train_step(init, loss, batch, num_stages, optimizer)


def llama3(
    layers=10, num_stages=4, width=512, heads=8, kv_heads=2, positions=512, vocabulary=32_000
) -> TrainStep:
    """Llama 3, with grouped queries and rotary positions; layers keep what policies call products."""
    size = width // heads

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
            "layers": stacked(init_layer, keys[1], layers),
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

    def loss(params, batch):
        params = cast(params)
        at = jnp.cumsum(batch["mask"], -1) - 1
        mask = jnp.tril(jnp.ones((positions, positions), bool)) & (batch["mask"] > 0)[:, None, None, :]
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

        def body(x, layer):
            x = jax.checkpoint(block, policy=policy)(x, layer, at, mask)
            return mpmd.mark_stage_end(x, num_stages=num_stages), None

        x, _ = lax.scan(body, params["embedder"][batch["inputs"]], params["layers"])
        return masked_cross_entropy(rms_norm(x, params["final_norm"]) @ params["lm_head"], batch)

    return train_step(init, loss, token_batch(positions), num_stages, adamw())


def diffusion_transformer(
    layers=10, num_stages=4, width=384, heads=6, side=32, patch=2, classes=1000
) -> TrainStep:
    """DiT: a noisy image in patches, conditioned on time and class by adaptive norms; averaged weights."""

    def linear(key, rows, columns):
        return {"w": normal(key, rows, columns), "b": jnp.zeros(columns)}

    def apply(p, x):
        return x @ p["w"] + p["b"]

    def init_layer(key):
        keys = jax.random.split(key, 5)
        return {
            "modulation": linear(keys[0], width, 6 * width),
            "qkv": linear(keys[1], width, 3 * width),
            "out": linear(keys[2], width, width),
            "up": linear(keys[3], width, 4 * width),
            "down": linear(keys[4], 4 * width, width),
        }

    def init(key):
        keys = jax.random.split(key, 7)
        return {
            "patches": {"w": normal(keys[0], patch, patch, 4, width), "b": jnp.zeros(width)},
            "time": [linear(keys[1], 256, width), linear(keys[2], width, width)],
            "classes": normal(keys[3], classes + 1, width),
            "blocks": stacked(init_layer, keys[4], layers),
            "final": [linear(keys[5], width, 2 * width), linear(keys[6], width, patch * patch * 4)],
        }

    def norm(x, shift, scale):
        return layer_norm(x, 1.0, 0.0) * (1 + scale[:, None]) + shift[:, None]

    def block(x, layer, condition):
        modulation = apply(layer["modulation"], jax.nn.silu(condition))
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(modulation, 6, -1)
        qkv = apply(layer["qkv"], norm(x, shift_1, scale_1)).reshape(*x.shape[:2], 3, heads, -1)
        h = attention(*jnp.moveaxis(qkv, 2, 0)).reshape(x.shape)
        x = x + gate_1[:, None] * apply(layer["out"], h)
        h = jax.nn.gelu(apply(layer["up"], norm(x, shift_2, scale_2)))
        return x + gate_2[:, None] * apply(layer["down"], h)

    def loss(params, batch):
        keys = jax.random.split(jax.random.wrap_key_data(batch["key"]), 3)
        times = jax.random.uniform(keys[0], (ROWS,))
        noise = jax.random.normal(keys[1], batch["images"].shape)
        labels = jnp.where(jax.random.bernoulli(keys[2], 0.1, (ROWS,)), classes, batch["labels"])
        at = times[:, None, None, None]
        noisy = (1 - at) * batch["images"] + at * noise

        angles = 1000 * times[:, None] * jnp.exp(-jnp.log(10_000.0) * jnp.arange(128) / 128)
        condition = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        condition = apply(params["time"][1], jax.nn.silu(apply(params["time"][0], condition)))
        condition = condition + params["classes"][labels]
        layout = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            noisy, params["patches"]["w"], (patch, patch), "VALID", dimension_numbers=layout
        )
        x = (x + params["patches"]["b"]).reshape(ROWS, -1, width)

        def body(x, layer):
            return mpmd.mark_stage_end(block(x, layer, condition), num_stages=num_stages), None

        x, _ = lax.scan(body, x, params["blocks"])
        shift, scale = jnp.split(apply(params["final"][0], jax.nn.silu(condition)), 2, -1)
        x = apply(params["final"][1], norm(x, shift, scale))
        blocks = side // patch
        velocity = x.reshape(ROWS, blocks, blocks, patch, patch, 4).transpose(0, 1, 3, 2, 4, 5)
        return jnp.mean((velocity.reshape(noise.shape) - (noise - batch["images"])) ** 2)

    batch = {
        "images": jax.ShapeDtypeStruct((ROWS, side, side, 4), jnp.float32),
        "labels": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        "key": jax.ShapeDtypeStruct((2,), jnp.uint32),
    }
    return train_step(init, loss, batch, num_stages, adamw(), ema=0.9999)


def encoder_decoder(
    encoder_layers=5, decoder_layers=5, width=512, heads=8, positions=256, vocabulary=32_128
) -> TrainStep:
    """T5: two scans of unlike layers, each in uneven stages, and biases that all layers of a scan share."""
    num_stages, buckets = 4, 32

    def attention_weights(key):
        return {
            name: normal(k, width, width) for name, k in zip("qkvo", jax.random.split(key, 4), strict=True)
        }

    def init_layer(key, crossing: bool):
        keys = jax.random.split(key, 5)
        names = ("self", "cross") if crossing else ("self",)
        layer = {name: attention_weights(k) for name, k in zip(names, keys, strict=False)}
        feed = {"gate": normal(keys[2], width, 3 * width), "up": normal(keys[3], width, 3 * width)}
        norms = {f"{name}_norm": jnp.ones(width) for name in (*names, "feed")}
        return layer | norms | feed | {"down": normal(keys[4], 3 * width, width)}

    def init(key):
        keys = jax.random.split(key, 6)
        return {
            "embedding": normal(keys[0], vocabulary, width),
            "encoder": stacked(functools.partial(init_layer, crossing=False), keys[1], encoder_layers),
            "decoder": stacked(functools.partial(init_layer, crossing=True), keys[2], decoder_layers),
            "biases": {
                "encoder": normal(keys[3], buckets, heads),
                "decoder": normal(keys[4], buckets, heads),
            },
            "norms": {"encoder": jnp.ones(width), "decoder": jnp.ones(width)},
            "head": normal(keys[5], width, vocabulary),
        }

    def attend(weights, x, memory, mask, bias):
        q, k, v = (
            (source @ weights[name]).reshape(ROWS, -1, heads, width // heads)
            for name, source in zip("qkv", (x, memory, memory), strict=True)
        )
        return attention(q, k, v, mask, bias).reshape(x.shape) @ weights["o"]

    def feed_forward(layer, x):
        h = rms_norm(x, layer["feed_norm"])
        return x + (jax.nn.gelu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]

    def position_bias(table):
        distance = jnp.arange(positions)[None] - jnp.arange(positions)[:, None]
        return table[jnp.clip(distance + buckets // 2, 0, buckets - 1)].transpose(2, 0, 1)

    def loss(params, batch):
        params = cast(params)
        visible = (batch["source"] > 0)[:, None, None, :]
        causal = jnp.tril(jnp.ones((positions, positions), bool))
        biases = {name: position_bias(table) for name, table in params["biases"].items()}

        def encode(x, layer):
            h = rms_norm(x, layer["self_norm"])
            x = x + attend(layer["self"], h, h, visible, biases["encoder"])
            return mpmd.mark_stage_end(feed_forward(layer, x), num_stages=2), None

        x, _ = lax.scan(encode, params["embedding"][batch["source"]], params["encoder"])
        memory = rms_norm(x, params["norms"]["encoder"])

        def decode(x, layer):
            h = rms_norm(x, layer["self_norm"])
            x = x + attend(layer["self"], h, h, causal, biases["decoder"])
            x = x + attend(layer["cross"], rms_norm(x, layer["cross_norm"]), memory, visible, 0.0)
            return mpmd.mark_stage_end(feed_forward(layer, x), num_stages=2), None

        x, _ = lax.scan(decode, params["embedding"][batch["inputs"]], params["decoder"])
        return masked_cross_entropy(rms_norm(x, params["norms"]["decoder"]) @ params["head"], batch)

    batch = {**token_batch(positions), "source": jax.ShapeDtypeStruct((ROWS, positions), jnp.int32)}
    return train_step(init, loss, batch, num_stages, adamw())


MODELS: dict[str, Callable[[], TrainStep]] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "llama3_of_8_stages": functools.partial(llama3, layers=16, num_stages=8),
    "diffusion_transformer": diffusion_transformer,
    "diffusion_transformer_of_8_stages": functools.partial(diffusion_transformer, layers=24, num_stages=8),
    "encoder_decoder": encoder_decoder,
}
"""By default 10 layers in 4 stages; those of 8 stages have as many layers in each."""
