"""A small byte-level GPT in plain JAX: parameters are nested dicts, layers are functions.

The only line that knows of pipelines is the call of ``mark_stage_end`` in ``logits``; for long sequences
there is another loss, ``sliced_loss``.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import mpmd


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of the model, and the number of pipeline stages its layers are spread over."""

    num_layers: int
    d_model: int
    num_heads: int
    seq_len: int
    num_stages: int = 1
    vocab_size: int = 256

    def __post_init__(self):
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of {self.num_heads} heads")
        if not 1 <= self.num_stages <= self.num_layers:
            raise ValueError(f"{self.num_layers} layers cannot fill {self.num_stages} stages")

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The layers that end a stage; the last stage ends with the loss."""
        return mpmd.stage_ends(self.num_layers, self.num_stages)


def init_params(key: jax.Array, config: GPTConfig) -> dict:
    """Draws float32 parameters; ``key`` is a JAX PRNG key."""
    d = config.d_model
    residual_scale = 0.02 / np.sqrt(2 * config.num_layers)  # GPT-2: keeps the residual stream's variance

    def normal(key, *shape, scale=0.02):
        return scale * jax.random.normal(key, shape)

    def init_block(key):
        keys = jax.random.split(key, 4)
        return {
            "attention_norm": init_norm(d),
            "qkv": normal(keys[0], d, 3 * d),
            "attention_out": normal(keys[1], d, d, scale=residual_scale),
            "mlp_norm": init_norm(d),
            "mlp_in": normal(keys[2], d, 4 * d),
            "mlp_out": normal(keys[3], 4 * d, d, scale=residual_scale),
        }

    token_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + config.num_layers)
    return {
        "token_embedding": normal(token_key, config.vocab_size, d),
        "position_embedding": normal(position_key, config.seq_len, d),
        "blocks": [init_block(key) for key in block_keys],
        "head_norm": init_norm(d),
        "head": normal(head_key, d, config.vocab_size),
    }


def init_norm(d_model: int) -> dict:
    return {"scale": jnp.ones(d_model), "bias": jnp.zeros(d_model)}


def layer_norm(params: dict, x: jax.Array) -> jax.Array:
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centered).mean(axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention to what came before; all are float32[batch, seq_len, num_heads, head_dim].

    The queries may be of the last tokens alone.
    """
    before, head_dim = key.shape[1] - query.shape[1], query.shape[3]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(head_dim)
    causal = jnp.tri(query.shape[1], key.shape[1], before, dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def queries_keys_values(params: dict, x: jax.Array, num_heads: int) -> jax.Array:
    """Of a layer, stacked: float32[3, batch, seq_len, num_heads, head_dim]."""
    qkv = layer_norm(params["attention_norm"], x) @ params["qkv"]
    return jnp.moveaxis(qkv.reshape(*x.shape[:2], num_heads, 3, -1), 3, 0)


def behind_attention(params: dict, x: jax.Array, attended: jax.Array) -> jax.Array:
    """The rest of a layer whose input is ``x``."""
    x = x + attended.reshape(x.shape) @ params["attention_out"]
    hidden = jax.nn.gelu(layer_norm(params["mlp_norm"], x) @ params["mlp_in"])
    return x + hidden @ params["mlp_out"]


def block(params: dict, x: jax.Array, num_heads: int) -> jax.Array:
    """One pre-norm transformer layer; ``x`` is float32[batch, seq_len, d_model]."""
    query, key, value = queries_keys_values(params, x, num_heads)
    return behind_attention(params, x, causal_attention(query, key, value))


def param_specs(config: GPTConfig) -> dict:
    """The devices' shares of parameters along an axis ``"model"`` (Shoeybi et al. 2019, section 3).

    The first matrix of each block is split by columns, that is whole heads and hidden units, the second by
    rows; all else is replicated.
    """
    norm = {"scale": P(), "bias": P()}
    columns, rows = P(None, "model"), P("model", None)
    layer = {
        "attention_norm": norm,
        "qkv": columns,
        "attention_out": rows,
        "mlp_norm": norm,
        "mlp_in": columns,
        "mlp_out": rows,
    }
    return {
        "token_embedding": P(),
        "position_embedding": P(),
        "blocks": [layer] * config.num_layers,
        "head_norm": norm,
        "head": P(),
    }


def logits(params: dict, tokens: jax.Array, config: GPTConfig) -> jax.Array:
    """Scores of the next byte: int32[batch, seq_len] to float32[batch, seq_len, vocab_size]."""
    x = params["token_embedding"][tokens] + params["position_embedding"]
    for layer, block_params in enumerate(params["blocks"]):
        x = block(block_params, x, config.num_heads)
        if layer in config.stage_ends:
            x = mpmd.mark_stage_end(x)
    return layer_norm(params["head_norm"], x) @ params["head"]


def loss(params: dict, tokens: jax.Array, targets: jax.Array, config: GPTConfig) -> jax.Array:
    """Mean cross-entropy in nats per byte; ``tokens`` and ``targets`` are int32[batch, seq_len]."""
    scores = logits(params, tokens, config)
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def sliced_loss(
    params: dict, tokens: jax.Array, targets: jax.Array, config: GPTConfig, bounds: Sequence[int]
) -> jax.Array:
    """Computes ``loss`` slice by slice of the sequences, which the positions ``bounds`` cut.

    A layer hands its keys and values to the slices after it. A schedule with slices pipelines them.
    """
    past = [[] for _ in params["blocks"]]
    total = 0.0
    positions = params["position_embedding"][None]
    for inputs, labels, of_positions in mpmd.slices((tokens, targets, positions), bounds):
        x = params["token_embedding"][inputs] + of_positions
        for layer, block_params in enumerate(params["blocks"]):
            query, key, value = queries_keys_values(block_params, x, config.num_heads)
            past[layer].append((key, value))
            keys, values = (jnp.concatenate(chunks, axis=1) for chunks in zip(*past[layer], strict=True))
            x = behind_attention(block_params, x, causal_attention(query, keys, values))
            if layer in config.stage_ends:
                x = mpmd.mark_stage_end(x)
        scores = layer_norm(params["head_norm"], x) @ params["head"]
        total += optax.softmax_cross_entropy_with_integer_labels(scores, labels).sum()
    return total / targets.size


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, eps=1e-6))


def init_state(params: dict) -> tuple[dict, optax.OptState]:
    return params, OPTIMIZER.init(params)


def updated(state: tuple[dict, optax.OptState], gradients: dict) -> tuple[dict, optax.OptState]:
    params, opt_state = state
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train(step, params: dict, batches) -> tuple[dict, list[float]]:
    """Parameters and Adam's moments after a step with each batch, and the losses."""
    state, losses = init_state(jax.tree.map(jnp.copy, params)), []
    for batch in batches:
        state, loss = step(state, *batch)
        losses.append(loss)
    moments = {name: optax.tree.get(state, name) for name in ("mu", "nu")}
    return {"params": state[0], **moments}, [float(loss) for loss in losses]


def generate(params: dict, prompt: bytes, num_bytes: int, config: GPTConfig, seed: int = 0) -> bytes:
    """Continues ``prompt`` by ``num_bytes`` sampled bytes (temperature 0.8), on one device."""

    @functools.partial(jax.jit, donate_argnums=1)
    def append(params, window, length, key):
        # Bytes after `length` are padding that causal attention never sees: one shape, one compile.
        scores = logits(params, window[None], config)[0, length - 1]
        sampled = jax.random.categorical(key, scores / 0.8)
        shifted = jnp.where(length == config.seq_len, jnp.roll(window, -1), window)
        position = jnp.minimum(length, config.seq_len - 1)
        return shifted.at[position].set(sampled), position + 1, sampled

    prompt = prompt[-config.seq_len :]
    window = jnp.zeros(config.seq_len, jnp.int32).at[: len(prompt)].set(np.frombuffer(prompt, np.uint8))
    length = jnp.int32(len(prompt))
    sampled = []
    for key in jax.random.split(jax.random.key(seed), num_bytes):
        window, length, byte = append(params, window, length, key)
        sampled.append(byte)
    return prompt + bytes(map(int, sampled))
