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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.ir.events import Event
from mpmd.ir.plan import Cell, Task
from mpmd.language.annotate import mark_stage_end
from mpmd.language.reduce import Add, treduce
from mpmd.planner.curves import Curve, ProductKind, rate_name
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


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured attributes of an ``mpmd.Cluster``; a link is ``None`` where no two devices have one."""

    flops: float
    memory_bandwidth: float
    task_overhead: float
    alone: float
    rates: Mapping[str, Curve]
    kernel_floor: float
    device_link: Link | None
    node_link: Link | None

    def known(self) -> dict[str, Any]:
        """The attributes that are not ``None``, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def calibrate(record_steps: RecordSteps, nodes: Sequence[Hashable], dtype: str = "float32") -> Calibration:
    """Measures the devices of a mesh, in less than a minute.

    Args:
      record_steps: runs a step on a mesh with one device for each group. The caller gives it, so that neither
        the compiler nor a runtime is needed here.
      nodes: the node of each group; groups of a node follow one another.
      dtype: the dtype of the matrix products.
    """
    groups = _Groups(len(nodes), record_steps)
    links = _links(groups) if groups.count > 1 else []
    within = [link for link, (a, b) in zip(links, _pairs(nodes), strict=True) if a == b]
    between = [link for link, (a, b) in zip(links, _pairs(nodes), strict=True) if a != b]
    rounds = [_rates(groups, jnp.dtype(dtype)) for _ in range(ROUNDS)]
    rates = {kind: _median([of_round[kind] for of_round in rounds]) for kind in rounds[0]}
    return Calibration(
        flops=rates["product"].flops,
        alone=rates["product"].alone,
        rates={rate_name(kind, jnp.dtype(dtype).name): rate.curve for kind, rate in rates.items()},
        kernel_floor=_task_seconds(groups, _small_kernels) / KERNELS,
        memory_bandwidth=(2 * PASSES + 1) * ARRAY_BYTES / _task_seconds(groups, _passes),
        task_overhead=_task_overhead(groups),
        device_link=_typical(within),
        node_link=_typical(between),
    )


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The groups of the mesh: their number, and the function that runs a step on them."""

    count: int
    record_steps: RecordSteps

    @property
    def repetitions(self) -> int:
        """The number of times that all groups run a task, for ``STEPS`` results."""
        return math.ceil(STEPS / self.count)

    def tasks(self, step: Callable[..., Any], *args: Any, steps: int = 1) -> list[list[Event]]:
        """The events of the loop's tasks, in a list for each of ``steps`` steps."""
        return [
            [event for event in events if isinstance(event.activity, Cell)]
            for events in self.record_steps(step, args, steps)
        ]


def _pairs(nodes: Sequence[Hashable]) -> list[tuple[Hashable, Hashable]]:
    return list(itertools.pairwise(nodes))


def _typical(links: Sequence[Link]) -> Link | None:
    if not links:
        return None
    return Link(
        statistics.median(link.latency for link in links),
        statistics.median(link.bandwidth for link in links),
    )


# Rates of a device.


def dtype_fault(name: str, dtype: Any) -> Fault | None:
    """The fault of a dtype of matrix products, which are of floats."""
    text = f"{name} must be a dtype of floats, such as 'float32' or 'bfloat16', not {shown(dtype)}"
    try:
        parsed = jnp.dtype(dtype) if dtype is not None else None
    except (TypeError, ValueError):
        return TypeError(text)
    return None if parsed is not None and jnp.issubdtype(parsed, jnp.floating) else ValueError(text)


@dataclasses.dataclass(frozen=True)
class _ProductsRate:
    """The rate of products of one kind.

    Attributes:
      flops: operations per second in the largest products; a lone task of these takes ``TASK_SECONDS``.
      curve: for square matrices, the rate through the smallest and the largest; otherwise constant.
      alone: for square matrices, the factor by which a group alone is faster.
    """

    flops: float
    curve: Curve
    alone: float = 1.0


def _rates(groups: _Groups, dtype: Any) -> dict[ProductKind, _ProductsRate]:
    products = _products_rate(groups, dtype)
    return {"product": products, **_other_products(groups, dtype, products)}


def _median(rates: Sequence[_ProductsRate]) -> _ProductsRate:
    """The rate in the middle with its curve, and the median of the gains alone."""
    middle = sorted(rates, key=lambda rate: rate.flops)[len(rates) // 2]
    return dataclasses.replace(middle, alone=statistics.median(rate.alone for rate in rates))


def _products_rate(groups: _Groups, dtype: Any) -> _ProductsRate:
    width, points = SMALLEST_WIDTH, []
    while True:
        work = functools.partial(_products, width=width, dtype=dtype)
        seconds = _task_seconds(groups, work)
        points.append((2.0 * width**3, seconds / PRODUCTS))
        is_largest = width >= LARGEST_WIDTH
        if seconds >= TASK_SECONDS or is_largest:
            lone = _lone_task_seconds(groups, work)
            if lone >= TASK_SECONDS or is_largest:
                curve = Curve.through(points[0], points[-1])
                return _ProductsRate(2.0 * PRODUCTS * width**3 / seconds, curve, max(seconds / lone, 1.0))
        width *= 2


def _other_products(groups: _Groups, dtype: Any, products: _ProductsRate) -> dict[ProductKind, _ProductsRate]:
    """The rates of batched products and convolutions, of as many operations as a task of square ones."""
    operations = products.flops * TASK_SECONDS / PRODUCTS
    of_pixel = 2.0 * (SIDE * WINDOW) ** 2
    kinds: dict[ProductKind, tuple[Callable[..., jax.Array], float]] = {
        "batched_product": (_batched_products, 2.0 * SIDE**3),
        "convolution": (_convolutions, of_pixel * IMAGE**2),
    }
    rates = {}
    for kind, (work, of_one) in kinds.items():
        count = max(1, round(operations / of_one))
        seconds = _task_seconds(groups, functools.partial(work, count=count, dtype=dtype))
        flops = PRODUCTS * count * of_one / seconds
        rates[kind] = _ProductsRate(flops, Curve(flops))
    return rates


def _batched_products(x: jax.Array, *, count: int, dtype: Any) -> jax.Array:
    """A sequence of products of ``count`` matrices each."""
    matrices = (jnp.sin(jnp.arange(count * SIDE * SIDE) + x) / math.sqrt(SIDE)).astype(dtype)
    matrices = matrices.reshape(count, SIDE, SIDE)
    result = jax.lax.fori_loop(0, PRODUCTS, lambda _, result: jnp.matmul(result, matrices), matrices)
    return result[0, 0, 0].astype(jnp.float32)


def _convolutions(x: jax.Array, *, count: int, dtype: Any) -> jax.Array:
    """A sequence of convolutions of ``count`` images each."""
    image = (count, IMAGE, IMAGE, SIDE)
    images = jnp.sin(jnp.arange(math.prod(image)) + x).astype(dtype).reshape(image)
    window = jnp.sin(jnp.arange((WINDOW * SIDE) ** 2) + x) / (WINDOW * math.sqrt(SIDE))
    window = window.astype(dtype).reshape(WINDOW, WINDOW, SIDE, SIDE)

    def convolved(_: Any, result: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(result, window, (1, 1), "SAME", dimension_numbers=layout)

    return jax.lax.fori_loop(0, PRODUCTS, convolved, images)[0, 0, 0, 0].astype(jnp.float32)


def _small_kernels(x: jax.Array) -> jax.Array:
    """A sequence of kernels with next to no work."""
    result = matrix = jnp.full((4, 4), x)
    for _ in range(KERNELS):
        result = result @ matrix
    return result[0, 0]


def _products(x: jax.Array, *, width: int, dtype: Any) -> jax.Array:
    """Multiplies a matrix ``PRODUCTS`` times, each time the last result."""
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
    """The seconds between the starts of consecutive empty tasks, while all groups run empty tasks."""
    events = _forwards(groups, _nothing, OVERHEAD_MICROBATCHES)
    spans = []
    for group in range(groups.count):
        of_group = [event for event in events if event.mpmd_idx == group]
        span = max(e.end for e in of_group) - min(e.start for e in of_group)
        spans.append(span / len(of_group))
    return statistics.median(spans)


def _nothing(x: jax.Array) -> jax.Array:
    """Next to no work; the compiler would take still less out of the task."""
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


def _links(groups: _Groups) -> list[Link]:
    """The link of each group to the next one."""
    small, large = _hops(groups, SMALL_MESSAGE_BYTES), _hops(groups, MESSAGE_BYTES)
    return [_link(latency, seconds) for latency, seconds in zip(small, large, strict=True)]


def _link(latency: float, seconds: float) -> Link:
    """Returns the link with ``latency``, and with the bandwidth at which a message of ``MESSAGE_BYTES``
    takes ``seconds``."""
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
    """The seconds of a message from each group to the next one, from the tasks of one step."""
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
