"""Models whose steps ``benchmarks.planner`` plans: with all left open, and cut and scheduled by hand.

Each is a sequence of layers, so that a cut by hand is the number of layers of each stage.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd
from benchmarks.chain import updated
from benchmarks.model import embed
from examples import gpt
from mpmd.compiler.jaxprs.work import total_operations

OPTIMIZER = optax.adam(1e-3)

Layer = Callable[[Any, Any], Any]
"""A function of its weights and of the activations of the layer before, which it may hand on with its own."""


def squared_error(outputs: Any, targets: jax.Array) -> jax.Array:
    """The mean of the squared differences; the targets may have one column, which stands for all."""
    return ((outputs - targets) ** 2).mean()


@dataclasses.dataclass(frozen=True)
class Model:
    """A sequence of layers with a loss.

    Attributes:
      layers: the first one takes the inputs of a batch.
      weights: makes the initial weights of each layer.
      batch: makes the inputs and the targets, with equally many rows; the same in every step.
      mismatch: the mean loss of the last layer's results and targets.
    """

    layers: Sequence[Layer]
    weights: Callable[[], list[Any]]
    batch: Callable[[], tuple[np.ndarray, np.ndarray]]
    mismatch: Callable[[Any, jax.Array], jax.Array] = squared_error

    def state(self) -> Any:
        """The weights and the state of ``OPTIMIZER`` with which a step begins."""
        weights = self.weights()
        return weights, OPTIMIZER.init(weights)

    def microbatches(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The batch in ``number`` microbatches."""
        x, y = (part.reshape(number, -1, *part.shape[1:]) for part in self.batch())
        return x, y

    def loss(self, weights: Sequence[Any], x: Any, y: jax.Array, ends: frozenset[int] = frozenset()) -> Any:
        """The loss; ``ends`` has the numbers of layers after which a stage ends."""
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
        """The operations of the forward of each layer, for a whole batch."""
        x, found = jax.eval_shape(lambda: self.batch()[0]), []
        for layer, of_layer in zip(self.layers, jax.eval_shape(self.weights), strict=True):
            jaxpr, x = jax.make_jaxpr(layer, return_shape=True)(of_layer, x)
            found.append(total_operations(jaxpr.eqns))
        return found


@dataclasses.dataclass(frozen=True)
class HandMade:
    """A plan by hand: the stages of a schedule, and the rule by which its layers are cut."""

    cut: str
    layers_per_stage: tuple[int, ...]
    schedule: mpmd.Schedule
    microbatches: int

    def __str__(self) -> str:
        layers = " ".join(map(str, self.layers_per_stage))
        return f"by hand: {self.schedule.name}, {self.cut} ({layers}), {self.microbatches} microbatches"


def by_hand(model: Model, groups: int) -> list[HandMade]:
    """The plans of an engineer who knows the layers, their parameters and their operations."""
    equal = equal_layers(len(model.layers), groups)
    by_parameters, by_work = balanced(model.parameters(), groups), balanced(model.work(), groups)
    plans = [
        HandMade("equal layers", equal, mpmd.Std1F1B(groups), 2 * groups),
        HandMade("equal layers", equal, mpmd.GPipe(groups), 2 * groups),
        HandMade("equal layers", equal, mpmd.ZeroBubble(groups), 4 * groups),
        HandMade("by parameters", by_parameters, mpmd.Std1F1B(groups), 4 * groups),
        HandMade("by work", by_work, mpmd.Std1F1B(groups), 2 * groups),
        HandMade("by work", by_work, mpmd.Std1F1B(groups), 4 * groups),
        HandMade("by work", by_work, mpmd.ZeroBubble(groups), 4 * groups),
    ]
    keys = [(plan.layers_per_stage, plan.schedule, plan.microbatches) for plan in plans]
    return [plan for number, plan in enumerate(plans) if keys[number] not in keys[:number]]


def equal_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """The layers of each stage: equally many, or one more in the first stages."""
    ends = [*mpmd.stage_ends(num_layers, stages), num_layers - 1]
    return tuple(b - a for a, b in itertools.pairwise([-1, *ends]))


def balanced(amounts: Sequence[int], stages: int) -> tuple[int, ...]:
    """The layers of each stage by which the largest stage has the least amount, as an engineer cuts."""
    cuts = itertools.combinations(range(1, len(amounts)), stages - 1)
    bounds = [(0, *cut, len(amounts)) for cut in cuts]
    best = min(bounds, key=lambda ends: max(sum(amounts[a:b]) for a, b in itertools.pairwise(ends)))
    return tuple(b - a for a, b in itertools.pairwise(best))


def _normal(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(0).standard_normal((2, *shape), "float32")
    return values[0], values[1]


def mlp(widths: Sequence[int], rows: int) -> Model:
    """Layers ``tanh(x @ weights)`` between these widths; one column of inputs stands for all."""
    shapes = list(itertools.pairwise(widths))

    def layer(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.broadcast_to(x, (len(x), len(weights))) @ weights)

    def weights() -> list[Any]:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return [
            jax.random.normal(key, shape) * shape[0] ** -0.5 for key, shape in zip(keys, shapes, strict=True)
        ]

    return Model([layer] * len(shapes), weights, lambda: _normal(rows, 1))


def u_net(channels: int, side: int, rows: int) -> Model:
    """Convolutions down to a quarter of the side and up again, where each level joins its earlier result.

    Activations are ``(images, side, side, channels)``; a layer also hands on those that are kept for later.
    """
    keeping = functools.partial(_convolved, keep=True)
    down = functools.partial(_convolved, stride=2)
    up, joined = functools.partial(_convolved, up=True), functools.partial(_convolved, join=True)
    last = functools.partial(_convolved, last=True)
    layers = (_entering, keeping, down, keeping, down, _convolved, up, joined, up, joined, last)
    c = channels
    inputs = (3, c, c, 2 * c, 2 * c, 4 * c, 4 * c, 4 * c, 2 * c, 2 * c, c)
    outputs = (c, c, 2 * c, 2 * c, 4 * c, 4 * c, 2 * c, 2 * c, c, c, 3)

    def weights() -> list[Any]:
        keys = jax.random.split(jax.random.key(0), len(inputs))
        return [
            {"w": jax.random.normal(key, (3, 3, i, o)) * (9 * i) ** -0.5, "b": jnp.zeros(o)}
            for key, i, o in zip(keys, inputs, outputs, strict=True)
        ]

    return Model(layers, weights, lambda: _normal(rows, side, side, 3), lambda x, y: squared_error(x[0], y))


def _entering(of_layer: Any, images: jax.Array) -> tuple[jax.Array, ...]:
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
      activations: the input, then the results that are kept for the way up.
      keep: whether its result is kept for the way up.
      up: whether pixels are doubled before it.
      join: whether its input gets the channels of the result that was kept last.
      last: whether its result is the model's, without ``relu``.
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


def large_vocabulary(blocks: int, width: int, heads: int, length: int, vocabulary: int, rows: int) -> Model:
    """A transformer whose head has most of the work, and head and embedding most of the parameters."""
    config = gpt.GPTConfig(blocks, width, heads, length, vocab_size=vocabulary)
    block = functools.partial(gpt.block, num_heads=heads)

    def weights() -> list[Any]:
        params = gpt.init_params(jax.random.key(0), config)
        first = {name: params[name] for name in ("token_embedding", "position_embedding")}
        return [first, *params["blocks"], {name: params[name] for name in ("head_norm", "head")}]

    def batch() -> tuple[np.ndarray, np.ndarray]:
        numbers = np.random.default_rng(0)
        tokens, targets = numbers.integers(0, vocabulary, (2, rows, length), dtype=np.int32)
        return tokens, targets

    def mismatch(scores: Any, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    return Model((embed, *[block] * blocks, _scores), weights, batch, mismatch)


def _scores(of_layer: Any, x: jax.Array) -> jax.Array:
    return gpt.layer_norm(of_layer["head_norm"], x) @ of_layer["head"]


MODELS: Mapping[str, Callable[[], Model]] = {
    "chain": lambda: mlp([768] * 7, rows=2048),
    "U-Net": lambda: u_net(channels=32, side=32, rows=32),
    "large vocabulary": lambda: large_vocabulary(4, 128, 4, 64, 16_384, rows=16),
    "uneven MLP": lambda: mlp((512, 1024, 2048, 512, 1024, 256, 1536, 512), rows=1024),
}
