"""The seconds that the tasks of each layer take on a submesh.

The time of a task is that of ``Hardware.seconds``, plus the sums over devices and what gathers weights, which
nothing hides. A backward also adds its gradients to accumulators: it reads both, and writes the accumulators.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mpmd.planner.collectives import INNERMOST_FIRST, all_gather, all_reduce
from mpmd.planner.hardware import Hardware
from mpmd.planner.search.layer_arrays import Array, GroupSettings, LayerArrays, product

DATA = INNERMOST_FIRST.index("data")


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """Seconds of each layer.

    Attributes:
      forward, backward: of one microbatch; the backward with what rematerialisation computes again.
      backward_weights: the part of the backward that nothing but gradients of weights needs: half of its
        products, since a product of a forward has two in the backward, of the same size, and the additions
        to accumulators.
      sums: the part of forward and backward that goes into sums over devices and gathered weights.
      step: of a step, outside the loop: sums of gradients, and the optimizer.
      step_sums: the part of ``step`` that goes into sums.
    """

    forward: Array
    backward: Array
    backward_weights: Array
    sums: Array
    step: Array
    step_sums: Array


def layer_seconds(arrays: LayerArrays, group: GroupSettings, cluster: Hardware) -> LayerSeconds:
    """The seconds of all layers on devices that run them as a setting says."""
    held = product(arrays.shares("weights", group.sizes))
    weights, gradients = arrays.of("weights") * held, arrays.of("gradients") * held
    forward = sum(_task_seconds(arrays, arrays.forward, group, cluster, weights))
    products, beside = _task_seconds(arrays, arrays.backward, group, cluster, weights + gradients)
    divided = group.sizes[DATA] if group.step.fsdp and not group.step.gather_once else 1
    adding = 3 * gradients / divided / cluster.memory_bandwidth
    sums_forward = _sums_of_task(arrays, group, "reduced_forward")
    sums_backward = _sums_of_task(arrays, group, "reduced_backward")
    again = forward + sums_forward if group.step.remat else np.zeros_like(forward)
    gather = scatter = np.zeros_like(forward)
    step_sums = _sums_of_step(arrays, group)
    if group.step.gather_once:
        gathered = all_gather(group.sizes[DATA], weights, group.links[DATA])
        step_sums = step_sums + gathered + all_gather(group.sizes[DATA], gradients, group.links[DATA])
    elif group.step.fsdp:
        gather = all_gather(group.sizes[DATA], weights, group.links[DATA])
        scatter = all_gather(group.sizes[DATA], gradients, group.links[DATA])
    if not arrays.profile.has_backward:
        products = beside = adding = sums_backward = again = scatter = np.zeros_like(forward)
    gathers = gather + gather if arrays.profile.has_backward else gather
    recomputed_sums = sums_forward if group.step.remat and arrays.profile.has_backward else 0 * forward
    return LayerSeconds(
        forward=forward + sums_forward + gather,
        backward=products + beside + adding + sums_backward + again + (gathers - gather) + scatter,
        backward_weights=products / 2 + adding + scatter,
        sums=sums_forward + sums_backward + recomputed_sums + gathers + scatter,
        step=step_sums + _optimizer_seconds(arrays, group, cluster, weights),
        step_sums=step_sums,
    )


def _task_seconds(
    arrays: LayerArrays,
    work: tuple[Array, ...],
    group: GroupSettings,
    cluster: Hardware,
    weights: Array,
) -> tuple[Array, Array]:
    """Those of products, and those of all else, without sums.

    ``weights`` are the bytes of products that do not depend on the rows, on each device.
    """
    operations, nbytes, beside, _ = work
    rows = arrays.rows(group)
    share = rows * product(arrays.shares("activations", group.sizes))
    operations = operations * rows * product(arrays.shares("operations", group.sizes))
    products = cluster.seconds(operations, (nbytes - beside) * share + weights, np.zeros_like(weights))
    return products, cluster.seconds(np.zeros_like(weights), np.zeros_like(weights), beside * share)


def _sums_of_task(arrays: LayerArrays, group: GroupSettings, field: str) -> Array:
    shares = arrays.shares("activations", group.sizes)
    return arrays.rows(group) * _sums(arrays, group, field, shares)


def _sums_of_step(arrays: LayerArrays, group: GroupSettings) -> Array:
    """Those of gradients after the loop. What is divided over ``data`` is summed in each microbatch."""
    axes = [axis for axis in range(len(group.sizes)) if not (group.step.fsdp and axis == DATA)]
    return _sums(arrays, group, "reduced_per_step", arrays.shares("weights", group.sizes), axes)


def _sums(
    arrays: LayerArrays,
    group: GroupSettings,
    field: str,
    shares: list[Array],
    axes: list[int] | None = None,
) -> Array:
    """The seconds of the sums along axes, of values that the other axes divide."""
    seconds = np.zeros(len(arrays.profile.layers))
    for axis in range(len(group.sizes)) if axes is None else axes:
        if group.sizes[axis] > 1:
            others = product(share for other, share in enumerate(shares) if other != axis)
            nbytes = arrays.divided(field)[axis] * others
            seconds += all_reduce(group.sizes[axis], nbytes, group.links[axis])
    return seconds


def _optimizer_seconds(arrays: LayerArrays, group: GroupSettings, cluster: Hardware, weights: Array) -> Array:
    """The part of the work outside the loop that goes with a device's weights."""
    outside, whole = arrays.profile.outside, arrays.of("weights").sum()
    of_products = outside.nbytes - outside.nbytes_beside
    seconds = cluster.seconds(outside.operations, of_products, outside.nbytes_beside)
    divided = group.sizes[DATA] if group.step.fsdp else 1
    return seconds * weights / divided / whole if whole else np.zeros_like(weights)
