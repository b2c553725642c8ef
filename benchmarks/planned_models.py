"""Models whose train steps are planned: as steps that leave all open, and cut and scheduled by hand.

Each is a sequence of layers, so that every cut by hand is one by their number. The state of a step is that of
``OPTIMIZER`` with the weights of all layers.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd
from benchmarks.chain import as_wide, updated
from benchmarks.running_steps import OPTIMIZER
from examples import gpt
from mpmd.compiler.jaxprs.work import total_operations

Layer = Callable[[Any, Any], Any]
"""A function of its weights and of what the layer before it returns: activations, with those to be kept."""


class Model(abc.ABC):
    """A sequence of layers with a loss, and a batch of ``rows`` examples."""

    name: str
    rows: int

    @property
    @abc.abstractmethod
    def layers(self) -> Sequence[Layer]:
        """The layers, the first of which takes the inputs of a batch."""

    @abc.abstractmethod
    def weights(self) -> list[Any]:
        """The weights of each layer, as a step begins with them."""

    @abc.abstractmethod
    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and the targets, each with ``rows`` rows; the same in every step."""

    @abc.abstractmethod
    def mismatch(self, outputs: Any, targets: jax.Array) -> jax.Array:
        """The mean loss of what the last layer returns."""

    def state(self) -> Any:
        """The state that a step begins with."""
        weights = self.weights()
        return weights, OPTIMIZER.init(weights)

    def microbatches(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The batch in so many microbatches."""
        x, y = (part.reshape(number, -1, *part.shape[1:]) for part in self.batch())
        return x, y

    def loss(self, weights: Sequence[Any], x: Any, y: jax.Array, ends: frozenset[int] = frozenset()) -> Any:
        """The loss of examples.

        Args:
          ends: the numbers of layers after which a stage ends.
        """
        for number, (layer, of_layer) in enumerate(zip(self.layers, weights, strict=True), 1):
            x = layer(of_layer, x)
            if number in ends:
                x = mpmd.mark_stage_end(x)
        return self.mismatch(x, y)

    def open_step(self, state: Any, x: Any, y: Any) -> tuple[Any, jax.Array]:
        """A step on a whole batch, with all open that ``mpmd.plan`` can choose."""
        loss, gradients = mpmd.value_and_grad(self.loss)(state[0], x, y)
        return updated(OPTIMIZER, state, gradients), loss

    def scheduled_step(self, layers_per_stage: Sequence[int], schedule: mpmd.Schedule) -> Callable:
        """A step on a batch in microbatches, with the stages and the schedule of the caller."""
        ends = frozenset(itertools.accumulate(layers_per_stage[:-1]))

        def step(state: Any, xs: Any, ys: Any) -> tuple[Any, jax.Array]:
            loss, gradients = mpmd.treduce(
                lambda batch: jax.value_and_grad(self.loss)(state[0], *batch, ends),
                (xs, ys),
                schedule=schedule,
                operation=mpmd.Mean,
            )
            return updated(OPTIMIZER, state, gradients), loss

        return step

    def parameters(self) -> list[int]:
        """The number of parameters of each layer."""
        shapes = jax.eval_shape(self.weights)
        return [sum(leaf.size for leaf in jax.tree.leaves(of_layer)) for of_layer in shapes]

    def work(self) -> list[int]:
        """The operations of the forward of each layer, of a whole batch."""
        x, found = jax.eval_shape(lambda: self.batch()[0]), []
        for layer, of_layer in zip(self.layers, jax.eval_shape(self.weights), strict=True):
            jaxpr, x = jax.make_jaxpr(layer, return_shape=True)(of_layer, x)
            found.append(total_operations(jaxpr.eqns))
        return found


def equal_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """As many layers in each stage as in the others, or one more in the first ones."""
    ends = [*mpmd.stage_ends(num_layers, stages), num_layers - 1]
    return tuple(b - a for a, b in itertools.pairwise([-1, *ends]))


def balanced(amounts: Sequence[int], stages: int) -> tuple[int, ...]:
    """The number of layers of each stage by which the largest stage has the least, as an engineer cuts."""
    cuts = itertools.combinations(range(1, len(amounts)), stages - 1)
    bounds = [(0, *cut, len(amounts)) for cut in cuts]
    best = min(bounds, key=lambda ends: max(sum(amounts[a:b]) for a, b in itertools.pairwise(ends)))
    return tuple(b - a for a, b in itertools.pairwise(best))


def normal(rows: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of the standard normal distribution."""
    values = np.random.default_rng(0).standard_normal((2, rows, *shape), "float32")
    return values[0], values[1]


def squared_error(outputs: Any, targets: jax.Array) -> jax.Array:
    """The mean of the squared differences; the targets may have one column, which stands for all."""
    return ((outputs - targets) ** 2).mean()


def dense(of_layer: jax.Array, x: jax.Array) -> jax.Array:
    """A layer of the chain and of the MLP: weights ``(inputs, outputs)``."""
    return jnp.tanh(as_wide(x, of_layer) @ of_layer)


@dataclasses.dataclass(frozen=True)
class Chain(Model):
    """Square layers."""

    num_layers: int = 6
    width: int = 768
    rows: int = 2048
    name = "chain"

    @property
    def layers(self) -> Sequence[Layer]:
        return (dense,) * self.num_layers

    def weights(self) -> list[Any]:
        keys = jax.random.split(jax.random.key(0), self.num_layers)
        return [jax.random.normal(key, (self.width, self.width)) * self.width**-0.5 for key in keys]

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        return normal(self.rows, 1)

    mismatch = staticmethod(squared_error)


@dataclasses.dataclass(frozen=True)
class UnevenMLP(Model):
    """Layers whose widths differ by a factor of up to eight."""

    widths: tuple[int, ...] = (512, 1024, 2048, 512, 1024, 256, 1536, 512)
    rows: int = 1024
    name = "uneven MLP"

    @property
    def layers(self) -> Sequence[Layer]:
        return (dense,) * (len(self.widths) - 1)

    def weights(self) -> list[Any]:
        shapes = list(itertools.pairwise(self.widths))
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return [
            jax.random.normal(key, shape) * shape[0] ** -0.5 for key, shape in zip(keys, shapes, strict=True)
        ]

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        return normal(self.rows, 1)

    mismatch = staticmethod(squared_error)


@dataclasses.dataclass(frozen=True)
class UNet(Model):
    """Convolutions down to a quarter of the side and up again, where each level takes what it had before.

    Activations are ``(images, side, side, channels)``; what a layer returns has those that are kept behind.
    """

    channels: int = 32
    side: int = 32
    rows: int = 32
    name = "U-Net"

    @property
    def layers(self) -> Sequence[Layer]:
        keeping = functools.partial(_convolved, keep=True)
        down = functools.partial(_convolved, stride=2)
        up, joined = functools.partial(_convolved, up=True), functools.partial(_convolved, join=True)
        last = functools.partial(_convolved, last=True)
        return (_entering, keeping, down, keeping, down, _convolved, up, joined, up, joined, last)

    def weights(self) -> list[Any]:
        c = self.channels
        inputs = (3, c, c, 2 * c, 2 * c, 4 * c, 4 * c, 4 * c, 2 * c, 2 * c, c)
        outputs = (c, c, 2 * c, 2 * c, 4 * c, 4 * c, 2 * c, 2 * c, c, c, 3)
        keys = jax.random.split(jax.random.key(0), len(inputs))
        return [
            {"w": jax.random.normal(key, (3, 3, i, o)) * (9 * i) ** -0.5, "b": jnp.zeros(o)}
            for key, i, o in zip(keys, inputs, outputs, strict=True)
        ]

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        return normal(self.rows, self.side, self.side, 3)

    def mismatch(self, outputs: Any, targets: jax.Array) -> jax.Array:
        return squared_error(outputs[0], targets)


def _entering(of_layer: Any, images: jax.Array) -> tuple[jax.Array, ...]:
    """The first layer."""
    return _convolved(of_layer, (images,))


def _convolved(
    of_layer: Any,
    activations: tuple[jax.Array, ...],
    keep: bool = False,
    stride: int = 1,
    up: bool = False,
    join: bool = False,
    last: bool = False,
) -> tuple[jax.Array, ...]:
    """A convolution by windows of 3 x 3.

    Args:
      keep: whether its result is kept for the way up.
      up: whether pixels are doubled before it.
      join: whether it takes what was kept last, too.
      last: whether the result is that of the model.
    """
    x, *kept = activations
    if up:
        x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
    if join:
        x = jnp.concatenate([x, kept.pop()], -1)
    x = jax.lax.conv_general_dilated(
        x, of_layer["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = x + of_layer["b"]
    if not last:
        x = jax.nn.relu(x)
    return (x, *kept, x) if keep else (x, *kept)


@dataclasses.dataclass(frozen=True)
class LargeVocabulary(Model):
    """A transformer in which the head has most of the work, and head and embedding most of the parameters."""

    blocks: int = 4
    width: int = 128
    heads: int = 4
    length: int = 64
    vocabulary: int = 16_384
    rows: int = 16
    name = "large vocabulary"

    @property
    def layers(self) -> Sequence[Layer]:
        block = functools.partial(gpt.block, num_heads=self.heads)
        return (_embedded, *[block] * self.blocks, _scores)

    def weights(self) -> list[Any]:
        config = gpt.GPTConfig(self.blocks, self.width, self.heads, self.length, vocab_size=self.vocabulary)
        params = gpt.init_params(jax.random.key(0), config)
        first = {name: params[name] for name in ("token_embedding", "position_embedding")}
        return [first, *params["blocks"], {name: params[name] for name in ("head_norm", "head")}]

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (2, self.rows, self.length)
        tokens = np.random.default_rng(0).integers(0, self.vocabulary, shape, dtype=np.int32)
        return tokens[0], tokens[1]

    def mismatch(self, outputs: Any, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


def _embedded(of_layer: Any, tokens: jax.Array) -> jax.Array:
    return of_layer["token_embedding"][tokens] + of_layer["position_embedding"]


def _scores(of_layer: Any, x: jax.Array) -> jax.Array:
    return gpt.layer_norm(of_layer["head_norm"], x) @ of_layer["head"]
