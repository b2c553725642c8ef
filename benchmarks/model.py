"""The transformer of ``examples/gpt.py`` as one train step, and cut by hand for peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import mpmd
from benchmarks import chain
from benchmarks.workload import LEARNING_RATE, WEIGHT_DECAY, Workload
from examples import gpt

OPTIMIZER = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

State = tuple[Any, Any]
"""Parameters, and the optimizer's state."""


def config_of(workload: Workload) -> gpt.GPTConfig:
    return gpt.GPTConfig(
        workload.layers,
        workload.d_model,
        workload.heads,
        workload.seq_len,
        workload.groups,
        workload.vocab_size,
    )


def init_params(workload: Workload) -> dict:
    """The parameters that every peer starts with, as numpy arrays."""
    return jax.tree.map(np.asarray, gpt.init_params(jax.random.key(0), config_of(workload)))


def init_state(workload: Workload) -> State:
    params = jax.tree.map(jax.numpy.array, init_params(workload))
    return params, OPTIMIZER.init(params)


def batch(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, each int32[microbatches, sequences, seq_len]; the same in every step."""
    shape = (workload.microbatches, workload.batch // workload.microbatches, workload.seq_len)
    numbers = np.random.default_rng(0)
    tokens, targets = numbers.integers(0, workload.vocab_size, (2, *shape), dtype=np.int32)
    return tokens, targets


def train_step(workload: Workload, schedule: mpmd.Schedule | None = None, loss: Callable = gpt.loss):
    """The step for ``mpmd``, by default with 1F1B, and for ``jax.jit``, where it accumulates by a scan."""
    config, schedule = config_of(workload), schedule or mpmd.Std1F1B(workload.groups)

    def step(state: State, tokens, targets) -> tuple[State, jax.Array]:
        def loss_and_gradients(microbatch):
            return jax.value_and_grad(loss)(state[0], *microbatch, config)

        sums = mpmd.treduce(loss_and_gradients, (tokens, targets), schedule=schedule, operation=mpmd.Add)
        value, gradients = jax.tree.map(lambda leaf: leaf / len(tokens), sums)
        return updated(state, gradients), value

    return step


def updated(state: State, gradients: Any) -> State:
    """The state after a step of ``OPTIMIZER``."""
    return chain.updated(OPTIMIZER, state, gradients)


def stage_params(workload: Workload, stage: int) -> dict:
    """The parameters that a stage reads."""
    params, config = init_params(workload), config_of(workload)
    ends = [*sorted(end + 1 for end in config.stage_ends), config.num_layers]
    first = ends[stage - 1] if stage else 0
    mine = {"blocks": params["blocks"][first : ends[stage]]}
    if stage == 0:
        mine |= {name: params[name] for name in ("token_embedding", "position_embedding")}
    if stage == workload.groups - 1:
        mine |= {name: params[name] for name in ("head_norm", "head")}
    return mine


def embed(params: dict, tokens: jax.Array) -> jax.Array:
    return params["token_embedding"][tokens] + params["position_embedding"]


def head_loss(params: dict, x: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss, for results ``x`` of the last layer."""
    scores = gpt.layer_norm(params["head_norm"], x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def apply_blocks(params: dict, x: jax.Array, workload: Workload) -> jax.Array:
    for block_params in params["blocks"]:
        x = gpt.block(block_params, x, workload.heads)
    return x
