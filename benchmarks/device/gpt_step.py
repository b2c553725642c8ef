"""A train step of the GPT of ``examples/gpt.py``."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import mpmd
from benchmarks.device.settings import Settings

OPTIMIZER = optax.adamw(1e-3)
MICROBATCHES = 8


@functools.cache
def gpt() -> Any:
    """The module ``examples/gpt.py``, which is in no package."""
    path = pathlib.Path(__file__).parents[2] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", path)
    assert spec is not None and spec.loader is not None, f"{path} cannot be imported"
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt"] = module
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a model and of a microbatch."""

    layers: int
    width: int
    heads: int
    length: int
    rows: int


SMALL, LARGE = Size(4, 64, 4, 32, 2), Size(8, 768, 12, 512, 2)


def size_of(settings: Settings) -> Size:
    """A model whose state and activations fit into a few GB; tiny when quick."""
    return SMALL if settings.quick else LARGE


@dataclasses.dataclass(frozen=True)
class GptStep:
    """A train step, and arrays of numpy that are its arguments.

    Attributes:
      function: of the state, tokens and targets; returns the next state and the loss.
      batch: tokens and targets, each ``int32[MICROBATCHES, rows, length]``.
    """

    function: Callable[..., tuple[Any, jax.Array]]
    state: Any
    batch: tuple[np.ndarray, np.ndarray]


def gpt_step(size: Size, stages: int, schedule: mpmd.Schedule | None = None) -> GptStep:
    """A step of AdamW with ``MICROBATCHES``, by default with 1F1B."""
    config = gpt().GPTConfig(size.layers, size.width, size.heads, size.length, stages)
    schedule = schedule or mpmd.Std1F1B(stages)

    def function(state, tokens, targets):
        params, optimizer_state = state
        loss, gradients = mpmd.treduce(
            lambda microbatch: jax.value_and_grad(gpt().loss)(params, *microbatch, config),
            (tokens, targets),
            schedule=schedule,
            operation=mpmd.Mean,
        )
        updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    text = np.random.default_rng(0).integers(0, 256, (MICROBATCHES, size.rows, size.length + 1), np.int32)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = gpt().init_params(jax.random.key(0), config)
        state = jax.tree.map(np.asarray, (params, OPTIMIZER.init(params)))
    return GptStep(function, state, (text[..., :-1], text[..., 1:]))
