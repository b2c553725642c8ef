"""The section of curves: seconds by size, of what a plan has to know about a device."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.device.gpt_step import gpt
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Effort, Table, seconds_of
from mpmd.util.tables import human_bytes

EFFORT, QUICK_EFFORT = Effort(repetitions=3, seconds=0.05), Effort(repetitions=2, seconds=0.01)
HEADS, HEAD_WIDTH = 16, 64
PINNED = "pinned_host"


class Point(NamedTuple):
    """A size of a curve: ``size`` as text; ``amount`` operations, bytes or calls in ``seconds``."""

    size: str
    amount: float
    seconds: float


def run(settings: Settings) -> Findings:
    """All curves on one device."""
    effort = QUICK_EFFORT if settings.quick else EFFORT
    widths = (64, 128) if settings.quick else (128, 256, 512, 1024, 2048, 4096, 8192)
    shapes = [(n, n, n) for n in widths] + [(k, widths[-1], k) for k in widths[:-1]]
    lengths = (32, 64) if settings.quick else (128, 256, 512, 1024, 2048)
    arrays = [2**power for power in ((10, 16) if settings.quick else range(10, 29, 3))]
    curves = {
        ("product, float32", "FLOP/s"): [product(shape, jnp.float32, effort) for shape in shapes],
        ("product, bfloat16", "FLOP/s"): [product(shape, jnp.bfloat16, effort) for shape in shapes],
        ("causal attention, float32", "FLOP/s"): [attention(length, effort) for length in lengths],
        ("memory", "B/s"): [memory(nbytes, effort) for nbytes in arrays],
        ("dispatch", "calls/s"): [dispatch(calls, effort) for calls in (1, 10, 100)],
    }
    if any(memory.kind == PINNED for memory in jax.devices()[0].addressable_memories()):
        for name, ends in {
            "to pinned host memory": ("device", PINNED),
            "from it": (PINNED, "device"),
        }.items():
            curves[name, "B/s"] = [copy(nbytes, *ends, effort) for nbytes in arrays]
    return findings_of(curves)


def findings_of(curves: dict[tuple[str, str], Sequence[Point]]) -> Findings:
    """A table for each curve."""
    tables = tuple(
        Table(
            name,
            ("size", "us", unit),
            tuple((p.size, f"{p.seconds * 1e6:.1f}", f"{p.amount / p.seconds:.3g}") for p in points),
        )
        for (name, unit), points in curves.items()
    )
    data = {
        name: {"unit": unit, "points": [point._asdict() for point in points]}
        for (name, unit), points in curves.items()
    }
    return Findings(tables, data)


def seconds_per_call(call: Callable[[], Any], effort: Effort) -> float:
    """The median over repetitions of calls in a row, of which the last one is waited for."""

    def several(count: int) -> None:
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)

    several(2)
    count = effort.steps(seconds_of(functools.partial(several, 1)))
    times = [seconds_of(functools.partial(several, count)) for _ in range(effort.repetitions)]
    return statistics.median(times) / count


def product(shape: tuple[int, int, int], dtype: Any, effort: Effort) -> Point:
    """An ``(m, k)`` matrix by a ``(k, n)`` one."""
    m, n, k = shape
    left, right = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
    multiply = jax.jit(jnp.matmul)
    return Point(f"{m} x {n} x {k}", 2.0 * m * n * k, seconds_per_call(lambda: multiply(left, right), effort))


def attention(length: int, effort: Effort) -> Point:
    """The attention of ``examples/gpt.py`` of one sequence, ``HEADS`` heads; both products count in full."""
    values = jnp.ones((1, length, HEADS, HEAD_WIDTH))
    attend = jax.jit(gpt().causal_attention)
    operations = 4.0 * HEADS * HEAD_WIDTH * length**2
    return Point(f"{length}", operations, seconds_per_call(lambda: attend(values, values, values), effort))


def memory(nbytes: int, effort: Effort) -> Point:
    """An array that is read, and another of its size that is written; both count."""
    array = jnp.ones(nbytes // 4)
    scale = jax.jit(lambda x: 0.5 * x + 1.0)
    return Point(human_bytes(nbytes), 2.0 * nbytes, seconds_per_call(lambda: scale(array), effort))


def dispatch(calls: int, effort: Effort) -> Point:
    """Calls of next to nothing, each of which takes what the one before has made."""
    add = jax.jit(lambda x: x + 1)
    x = jnp.zeros(())

    def chain() -> jax.Array:
        value = x
        for _ in range(calls):
            value = add(value)
        return jax.block_until_ready(value)

    return Point(f"{calls} in a row", calls, seconds_per_call(chain, effort))


def copy(nbytes: int, source: str, destination: str, effort: Effort) -> Point:
    """An array that is copied from one kind of memory of a device to another."""
    device = jax.devices()[0]
    start, end = (
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in (source, destination)
    )
    array = jax.device_put(jnp.ones(math.ceil(nbytes / 4)), start)
    seconds = seconds_per_call(lambda: jax.device_put(array, end, may_alias=False), effort)
    return Point(human_bytes(nbytes), float(nbytes), seconds)
