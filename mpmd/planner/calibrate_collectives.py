"""Measures collectives between the devices of a group, by running small steps on it.

Collectives run in one process, or in processes that XLA connects, while messages between groups go another
way. So the links that ``calibrate.py`` measures do not give the times of collectives.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.ir.plan import Task
from mpmd.language.reduce import Add, treduce
from mpmd.planner.calibrate import RecordSteps
from mpmd.planner.curves import CollectiveKind, Curve, collective_name
from mpmd.schedules import ForwardOnly

MICROBATCHES = 5

# The bytes of a value, and how many collectives of it are in a task.
SMALL, LARGE = (2**10, 64), (2**24, 4)


def group_axes(num_devices: int) -> dict[str, int]:
    """The axes of a group of all devices of a node: the prime factors of their number."""
    sizes, left = [], num_devices
    for factor in range(2, num_devices + 1):
        while left % factor == 0:
            sizes.append(factor)
            left //= factor
    return {f"axis_{position}": size for position, size in enumerate(sizes)}


def collective_rates(record_steps: RecordSteps, axes: Mapping[str, int]) -> dict[str, Curve]:
    """The curves of collectives by the names of ``Hardware.rates``, for groups along one axis, two and so on.

    All devices compute at the same time, in rings of neighbours.

    Args:
      record_steps: runs a step on a mesh of one group, which has ``axes``.
      axes: as of ``group_axes``.
    """
    rates = {}
    for position in reversed(range(len(axes))):
        inner = tuple(axes)[position:]
        size = math.prod(axes[axis] for axis in inner)
        for kind in get_args(CollectiveKind):
            work = functools.partial(_repeated, kind=kind, axes=inner, size=size)
            small, large = (
                (float(nbytes), _task_seconds(record_steps, work, nbytes=nbytes, count=count) / count)
                for nbytes, count in (SMALL, LARGE)
            )
            rates[collective_name(kind, size)] = Curve.through(small, large)
    return rates


def _task_seconds(record_steps: RecordSteps, work: Callable[..., jax.Array], **options: int) -> float:
    def step(xs: jax.Array) -> jax.Array:
        total: jax.Array = treduce(
            functools.partial(work, **options), xs, schedule=ForwardOnly(1, 1), operation=Add
        )
        return total

    (events,) = record_steps(step, (np.zeros(MICROBATCHES, np.float32),), 1)
    return statistics.median(event.duration for event in events if isinstance(event.activity, Task))


def _repeated(
    x: jax.Array, *, kind: CollectiveKind, axes: tuple[str, ...], size: int, nbytes: int, count: int
) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    collective = {"all_reduce": _all_reduce, "all_gather": _all_gather}[kind]
    elements = max(1, nbytes // 4 // size) * size

    @jax.shard_map(mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def repeated(x):
        value = jnp.full(elements if kind == "all_reduce" else elements // size, x)
        return jax.lax.fori_loop(0, count, lambda _, value: collective(value, axes, size), value)[0]

    return repeated(x)


def _all_reduce(value: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
    return jax.lax.psum(value, axes) / size


def _all_gather(value: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
    """Returns the part of the next device, as the compiler drops a gather of which devices read their own."""
    gathered = jax.lax.all_gather(value, axes, tiled=True)
    following = (jax.lax.axis_index(axes) + 1) % size
    return jax.lax.dynamic_slice_in_dim(gathered, following * value.size, value.size)
