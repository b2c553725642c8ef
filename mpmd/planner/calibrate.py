"""Measures how fast the devices of a mesh are, and the links between them, by running small steps on it.

The steps run like a user's, so they measure the speed of actual steps, in whatever process groups run. All
groups compute at the same time, so devices that share cores or memory are as slow as in a step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.ir.events import Event
from mpmd.ir.plan import Cell, Task
from mpmd.language.annotate import mark_stage_end
from mpmd.language.reduce import Add, treduce
from mpmd.planner.curves import Curve, ProductKind
from mpmd.schedules import ForwardOnly, GPipe
from mpmd.simulate import Link
from mpmd.validation import Fault, shown

RecordSteps = Callable[[Callable[..., Any], tuple[Any, ...], int], Sequence[Sequence[Event]]]
"""Runs a step with arguments the stated number of times on a mesh, and returns the events of each run."""

STEPS = 5
"""The least number of results of which the median counts."""

ROUNDS = 3
"""The number of times that rates of products are measured; the median counts, so a disturbed one does not."""

TASK_SECONDS = 0.02
"""The least seconds of lone tasks that tell how fast a device is: their overhead is small beside that."""

PRODUCTS, PASSES, KERNELS = 4, 8, 64
SIDE, IMAGE, WINDOW = 64, 32, 3
"""The sides of batched products and channels of images, and the sides of images and of their windows."""

SMALLEST_WIDTH, LARGEST_WIDTH = 256, 8192
ARRAY_BYTES, MESSAGE_BYTES, SMALL_MESSAGE_BYTES = 2**26, 2**24, 2**6
OVERHEAD_MICROBATCHES = 32


def calibrate(record_steps: RecordSteps, nodes: Sequence[Hashable], dtype: str = "float32") -> dict[str, Any]:
    """Measures the devices of a mesh, in less than a minute.

    Args:
      record_steps: runs a step on a mesh with one device for each group. The caller gives it, so that neither
        the compiler nor a runtime is needed here.
      nodes: the node of each group; groups of a node follow one another.
      dtype: the dtype of the matrix products.

    Returns: attributes of an ``mpmd.Cluster`` by name; without a link that no two devices have.
    """
    groups, of_dtype = _Groups(len(nodes), record_steps), jnp.dtype(dtype)
    links = _links(groups, nodes) if groups.count > 1 else {}
    rounds = [_square_products(groups, of_dtype) for _ in range(ROUNDS)]
    squares = sorted(rounds, key=lambda rate: rate.flops)[ROUNDS // 2]
    curves: dict[ProductKind, Curve] = {"product": squares.curve}
    for kind in _OTHER_PRODUCTS:
        rates = (_flops_of_others(groups, kind, of_dtype, squares.flops) for _ in range(ROUNDS))
        curves[kind] = Curve(statistics.median(rates))
    return {
        "flops": squares.flops,
        "alone": statistics.median(rate.alone for rate in rounds),
        "rates": {f"{kind} {of_dtype.name}": curve for kind, curve in curves.items()},
        "kernel_floor": _task_seconds(groups, _small_kernels) / KERNELS,
        "memory_bandwidth": (2 * PASSES + 1) * ARRAY_BYTES / _task_seconds(groups, _passes),
        "task_overhead": _task_overhead(groups),
        **links,
    }


@dataclasses.dataclass(frozen=True)
class _Groups:
    count: int
    record_steps: RecordSteps

    @property
    def repetitions(self) -> int:
        return math.ceil(STEPS / self.count)

    def tasks(self, step: Callable[..., Any], *args: Any, steps: int = 1) -> list[list[Event]]:
        return [
            [event for event in events if isinstance(event.activity, Cell)]
            for events in self.record_steps(step, args, steps)
        ]


# Rates of a device.


def dtype_fault(name: str, dtype: Any) -> Fault | None:
    text = f"{name} must be a dtype of floats, such as 'float32' or 'bfloat16', not {shown(dtype)}"
    try:
        parsed = jnp.dtype(dtype) if dtype is not None else None
    except (TypeError, ValueError):
        return TypeError(text)
    return None if parsed is not None and jnp.issubdtype(parsed, jnp.floating) else ValueError(text)


class _SquareProducts(NamedTuple):
    """The rate of products of square matrices.

    Attributes:
      flops: operations per second in the largest products; a task of such products takes ``TASK_SECONDS``
        alone.
      curve: the rate through the smallest and the largest products.
      alone: the factor by which a group alone is faster.
    """

    flops: float
    curve: Curve
    alone: float


def _square_products(groups: _Groups, dtype: Any) -> _SquareProducts:
    smallest, width = None, SMALLEST_WIDTH
    while True:
        work = functools.partial(_products, width=width, dtype=dtype)
        seconds, operations = _task_seconds(groups, work), 2.0 * width**3
        smallest = smallest or (operations, seconds / PRODUCTS)
        is_largest = width >= LARGEST_WIDTH
        if seconds >= TASK_SECONDS or is_largest:
            lone = _lone_task_seconds(groups, work)
            if lone >= TASK_SECONDS or is_largest:
                curve = Curve.through(smallest, (operations, seconds / PRODUCTS))
                return _SquareProducts(PRODUCTS * operations / seconds, curve, max(seconds / lone, 1.0))
        width *= 2


def _flops_of_others(groups: _Groups, kind: ProductKind, dtype: Any, flops: float) -> float:
    """The rate of batched products or convolutions, of as many operations as a task of square products.

    Args:
      flops: of square products.
    """
    work, operations = _OTHER_PRODUCTS[kind]
    count = max(1, round(flops * TASK_SECONDS / PRODUCTS / operations))
    seconds = _task_seconds(groups, functools.partial(work, count=count, dtype=dtype))
    return PRODUCTS * count * operations / seconds


def _batched_products(x: jax.Array, *, count: int, dtype: Any) -> jax.Array:
    matrices = (jnp.sin(jnp.arange(count * SIDE * SIDE) + x) / math.sqrt(SIDE)).astype(dtype)
    matrices = matrices.reshape(count, SIDE, SIDE)
    result = jax.lax.fori_loop(0, PRODUCTS, lambda _, result: jnp.matmul(result, matrices), matrices)
    return result[0, 0, 0].astype(jnp.float32)


def _convolutions(x: jax.Array, *, count: int, dtype: Any) -> jax.Array:
    image = (count, IMAGE, IMAGE, SIDE)
    images = jnp.sin(jnp.arange(math.prod(image)) + x).astype(dtype).reshape(image)
    window = jnp.sin(jnp.arange((WINDOW * SIDE) ** 2) + x) / (WINDOW * math.sqrt(SIDE))
    window = window.astype(dtype).reshape(WINDOW, WINDOW, SIDE, SIDE)

    def convolved(_: Any, result: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(result, window, (1, 1), "SAME", dimension_numbers=layout)

    return jax.lax.fori_loop(0, PRODUCTS, convolved, images)[0, 0, 0, 0].astype(jnp.float32)


_OTHER_PRODUCTS: Mapping[ProductKind, tuple[Callable[..., jax.Array], float]] = {
    "batched_product": (_batched_products, 2.0 * SIDE**3),
    "convolution": (_convolutions, 2.0 * (SIDE * WINDOW * IMAGE) ** 2),
}
"""The tasks of other kinds of products, and the operations of one matrix or image."""


def _small_kernels(x: jax.Array) -> jax.Array:
    result = matrix = jnp.full((4, 4), x)
    for _ in range(KERNELS):
        result = result @ matrix
    return result[0, 0]


def _products(x: jax.Array, *, width: int, dtype: Any) -> jax.Array:
    numbers = jnp.arange(width * width, dtype=jnp.float32).reshape(width, width)
    matrix = (jnp.sin(numbers + x) / math.sqrt(width)).astype(dtype)
    return jax.lax.fori_loop(0, PRODUCTS, lambda _, result: result @ matrix, matrix)[0, 0].astype(jnp.float32)


def _passes(x: jax.Array) -> jax.Array:
    """Writes an array, then reads and writes the whole array in each of ``PASSES`` passes."""
    array = jnp.full(ARRAY_BYTES // 4, x)
    return jax.lax.fori_loop(0, PASSES, lambda _, result: 0.5 * result + 1.0, array)[0]


def _task_seconds(groups: _Groups, work: Callable[[jax.Array], jax.Array]) -> float:
    """The seconds of a task that computes ``work`` of a number, while all groups run such tasks."""
    microbatches = groups.count + groups.repetitions
    events = _forwards(groups, work, microbatches)
    # In the middle of the step all groups are at work.
    middle = [
        event.duration
        for event in events
        if isinstance(event.activity, Task)
        and event.activity.stage + event.activity.microbatch in range(groups.count - 1, microbatches)
    ]
    return statistics.median(middle)


def _lone_task_seconds(groups: _Groups, work: Callable[[jax.Array], jax.Array]) -> float:
    """The seconds of the task while the other groups wait: a single microbatch is on one group at a time."""
    return statistics.median(event.duration for event in _forwards(groups, work, 1, groups.repetitions))


def _task_overhead(groups: _Groups) -> float:
    events = _forwards(groups, _nothing, OVERHEAD_MICROBATCHES)
    spans = []
    for group in range(groups.count):
        of_group = [event for event in events if event.mpmd_idx == group]
        span = max(e.end for e in of_group) - min(e.start for e in of_group)
        spans.append(span / len(of_group))
    return statistics.median(spans)


def _nothing(x: jax.Array) -> jax.Array:
    """The least work that the compiler leaves in a task."""
    matrix = jnp.full((4, 4), x)
    return (matrix @ matrix)[0, 0]


def _forwards(
    groups: _Groups, work: Callable[[jax.Array], jax.Array], microbatches: int, steps: int = 1
) -> list[Event]:
    """Returns the events of steps in which each group applies ``work`` to the value that it receives, for
    each microbatch."""
    num_stages = groups.count

    def loss(x):
        for stage in range(num_stages):
            x = work(x)
            if stage < num_stages - 1:
                x = mark_stage_end(x)
        return x

    def step(xs):
        return treduce(loss, xs, schedule=ForwardOnly(num_stages, num_stages), operation=Add)

    of_steps = groups.tasks(step, np.zeros(microbatches, np.float32), steps=steps)
    return [event for events in of_steps for event in events]


# Links between groups.


def _links(groups: _Groups, nodes: Sequence[Hashable]) -> dict[str, Link]:
    found: dict[str, list[Link]] = {}
    small, large = _hops(groups, SMALL_MESSAGE_BYTES), _hops(groups, MESSAGE_BYTES)
    for latency, seconds, (a, b) in zip(small, large, itertools.pairwise(nodes), strict=True):
        found.setdefault("device_link" if a == b else "node_link", []).append(_link(latency, seconds))
    return {
        name: Link(
            statistics.median(link.latency for link in links),
            statistics.median(link.bandwidth for link in links),
        )
        for name, links in found.items()
    }


def _link(latency: float, seconds: float) -> Link:
    latency = max(latency, 0.0)
    return Link(latency, MESSAGE_BYTES / (seconds - latency) if seconds > latency else math.inf)


def _hops(groups: _Groups, nbytes: int) -> list[float]:
    """The seconds of a message from each group to the next: half of the time of a message there and back.

    One microbatch goes through all groups and back. From the end of a stage's forward to the start of its
    backward there are the tasks of the next stage, and a message each way; so the clocks of two groups are
    never compared. A task that copies its message takes longer than a task of the first stage, which
    receives no message.
    """
    num_stages = groups.count

    def loss(weight, x):
        y = weight * x
        for _ in range(num_stages - 1):
            y = mark_stage_end(y) * 1.5
        return (y * y).sum()

    def step(weight, xs):
        grad = jax.value_and_grad(loss)
        schedule = GPipe(num_stages)
        return treduce(lambda x: grad(weight, x), xs, schedule=schedule, operation=Add)

    args = (np.ones(nbytes // 4, np.float32), np.ones(1, np.float32))
    of_steps = [_hops_of(events, num_stages) for events in groups.tasks(step, *args, steps=STEPS)]
    return [statistics.median(times) for times in zip(*of_steps, strict=True)]


def _hops_of(events: Sequence[Event], num_stages: int) -> list[float]:
    forwards, backwards = (
        [next(e for e in events if e.activity == Task(kind, stage, 0)) for stage in range(num_stages)]
        for kind in ("fwd", "bwd")
    )
    hops = []
    for stage in range(num_stages - 1):
        away = backwards[stage].start - forwards[stage].end
        there = backwards[stage + 1].end - forwards[stage + 1].start
        copying = max(forwards[stage + 1].duration - forwards[0].duration, 0.0)
        hops.append((away - there) / 2 + copying)
    return hops
