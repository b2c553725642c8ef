"""Seconds that the tasks of each layer take on a submesh.

The time of a task is that of ``Hardware.seconds``, plus its all-reduces and the gathering of weights, which
nothing hides. A backward also adds its gradients to accumulators: it reads both, and writes the accumulators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from mpmd.planner.collectives import all_gather, all_reduce
from mpmd.planner.hardware import Hardware
from mpmd.planner.search.layer_arrays import Array, GroupSettings, LayerArrays, product
from mpmd.planner.submesh import INNERMOST_FIRST

DATA = INNERMOST_FIRST.index("data")


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """Seconds of each layer.

    Attributes:
      forward, backward: of one microbatch; the backward with the forward that rematerialisation repeats.
      backward_weights: the part of the backward that only gradients of weights need: half of its products,
        since a product of a forward has two of the same size in the backward, and the additions to
        accumulators.
      all_reduce: the part of forward and backward that goes into all-reduces and gathered weights.
      step: of a step, outside the loop: all-reduces of gradients, and the optimizer.
      step_all_reduce: the part of ``step`` that goes into all-reduces and gathered weights.
    """

    forward: Array
    backward: Array
    backward_weights: Array
    all_reduce: Array
    step: Array
    step_all_reduce: Array


def layer_seconds(arrays: LayerArrays, group: GroupSettings, cluster: Hardware) -> LayerSeconds:
    """The seconds of all layers on the devices of a group."""
    held = product(arrays.shares("weights", group.sizes))
    weights, gradients = arrays.of("weights") * held, arrays.of("gradients") * held
    zero = np.zeros_like(weights)

    gathers_in_tasks = group.fsdp and not group.gather_once
    gather = _gather_over_data(group, weights) if gathers_in_tasks else zero
    computing = sum(_task_seconds(arrays, arrays.forward, group, cluster, weights))
    reducing = _all_reduces_of_task(arrays, group, "reduced_forward")
    step_all_reduce = _all_reduces_of_step(arrays, group, weights, gradients)
    step = step_all_reduce + _optimizer_seconds(arrays, group, cluster, weights)
    forward = computing + reducing + gather
    if not arrays.profile.has_backward:
        return LayerSeconds(forward, zero, zero, reducing + gather, step, step_all_reduce)

    scatter = _gather_over_data(group, gradients) if gathers_in_tasks else zero
    products, beside = _task_seconds(arrays, arrays.backward, group, cluster, weights + gradients)
    divided = group.sizes[DATA] if gathers_in_tasks else 1
    adding = 3 * gradients / divided / cluster.memory_bandwidth
    reducing_backward = _all_reduces_of_task(arrays, group, "reduced_backward")
    repeated = computing + reducing if group.remat else zero
    repeated_reducing = reducing if group.remat else zero
    return LayerSeconds(
        forward=forward,
        backward=products + beside + adding + reducing_backward + repeated + gather + scatter,
        backward_weights=products / 2 + adding + scatter,
        all_reduce=reducing + reducing_backward + repeated_reducing + 2 * gather + scatter,
        step=step,
        step_all_reduce=step_all_reduce,
    )


def _gather_over_data(group: GroupSettings, nbytes: Array) -> Array:
    """The seconds to gather values along ``data``, or to sum and scatter them."""
    return all_gather(group.sizes[DATA], nbytes, group.links[DATA])


def _task_seconds(
    arrays: LayerArrays, work: tuple[Array, ...], group: GroupSettings, cluster: Hardware, weights: Array
) -> tuple[Array, Array]:
    """The seconds of a task's products, and those of all else, without all-reduces.

    Args:
      weights: bytes of products on each device that do not depend on the rows.
    """
    operations, nbytes, beside, _ = work
    rows = arrays.rows(group)
    share = rows * product(arrays.shares("activations", group.sizes))
    operations = operations * rows * product(arrays.shares("operations", group.sizes))
    products = cluster.seconds(operations, (nbytes - beside) * share + weights, np.zeros_like(weights))
    return products, cluster.seconds(np.zeros_like(weights), np.zeros_like(weights), beside * share)


def _all_reduces_of_task(arrays: LayerArrays, group: GroupSettings, field: str) -> Array:
    """The seconds of the all-reduces of one microbatch."""
    shares = arrays.shares("activations", group.sizes)
    return arrays.rows(group) * _all_reduces(arrays, group, field, shares, range(len(group.sizes)))


def _all_reduces_of_step(
    arrays: LayerArrays, group: GroupSettings, weights: Array, gradients: Array
) -> Array:
    """The seconds of the all-reduces of gradients after the loop, and of weights that are gathered once.

    Gradients of weights that are divided over ``data`` are summed along it in each microbatch, or with the
    gathered weights.
    """
    axes = [axis for axis in range(len(group.sizes)) if not (group.fsdp and axis == DATA)]
    shares = arrays.shares("weights", group.sizes)
    seconds = _all_reduces(arrays, group, "reduced_per_step", shares, axes)
    if group.gather_once:
        seconds = seconds + _gather_over_data(group, weights) + _gather_over_data(group, gradients)
    return seconds


def _all_reduces(
    arrays: LayerArrays, group: GroupSettings, field: str, shares: list[Array], axes: Iterable[int]
) -> Array:
    """The seconds of all-reduces along axes, of values that the other axes divide."""
    seconds = np.zeros(len(arrays.profile.layers))
    for axis in axes:
        if group.sizes[axis] > 1:
            others = product(share for other, share in enumerate(shares) if other != axis)
            nbytes = arrays.divided(field)[axis] * others
            seconds += all_reduce(group.sizes[axis], nbytes, group.links[axis])
    return seconds


def _optimizer_seconds(arrays: LayerArrays, group: GroupSettings, cluster: Hardware, weights: Array) -> Array:
    """The seconds of the work outside the loop, in proportion to the weights on a device."""
    outside, whole = arrays.profile.outside, arrays.of("weights").sum()
    of_products = outside.nbytes - outside.nbytes_beside
    seconds = cluster.seconds(outside.operations, of_products, outside.nbytes_beside)
    divided = group.sizes[DATA] if group.fsdp else 1
    return seconds * weights / divided / whole if whole else np.zeros_like(weights)
