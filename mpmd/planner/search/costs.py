"""Seconds that the tasks of each layer take on a submesh.

The time of a task is the sum of ``hardware.seconds_by_part``, its all-reduces and the gathering of weights.
Nothing hides all-reduces. Gathers are hidden by the computing of the same layer, if the cluster says so. A
backward also adds its gradients to accumulators: ``hardware.accesses_to_add``.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mpmd.planner.all_reduces import AllReduces
from mpmd.planner.curves import ProductWork
from mpmd.planner.hardware import Hardware, accesses_to_add, seconds_by_part
from mpmd.planner.layer_profile import TaskWork
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
    held = product(arrays.shares("weights", group.sizes))
    weights, gradients = arrays.of("weights") * held, arrays.of("gradients") * held
    zero = np.zeros_like(weights)

    gathers_in_tasks = group.fsdp and not group.gather_once
    gathered = arrays.of("gathered") * held
    gather = _gather_over_data(group, gathered) if gathers_in_tasks else zero
    computing = np.add(*_task_seconds(arrays, arrays.forward, group, cluster, weights))
    reducing = _all_reduces_of_task(arrays, group, cluster, "forward")
    step_all_reduce = _all_reduces_of_step(arrays, group, gathered, gradients)
    step = step_all_reduce + _optimizer_seconds(arrays, group, cluster, weights)
    gather_forward = _exposed(gather, computing, cluster)
    forward = computing + reducing + gather_forward
    if not arrays.profile.has_backward:
        return LayerSeconds(forward, zero, zero, reducing + gather_forward, step, step_all_reduce)

    scatter = _gather_over_data(group, gradients) if gathers_in_tasks else zero
    products, beside = _task_seconds(arrays, arrays.backward, group, cluster, weights + gradients)
    divided = group.sizes[DATA] if gathers_in_tasks else 1
    adding = accesses_to_add(cluster) * gradients / divided / cluster.memory_bandwidth
    reducing_backward = _all_reduces_of_task(arrays, group, cluster, "backward")
    repeated = _repeated_seconds(arrays, group, cluster, weights)
    repeated_reducing = reducing * arrays.recomputed(group.remat).reduced
    computing_backward = products + beside + adding + repeated
    moving = _exposed(gather + scatter, computing_backward, cluster)
    return LayerSeconds(
        forward=forward,
        backward=computing_backward + reducing_backward + repeated_reducing + moving,
        backward_weights=products / 2 + adding + np.minimum(scatter, moving),
        all_reduce=reducing + reducing_backward + repeated_reducing + gather_forward + moving,
        step=step,
        step_all_reduce=step_all_reduce,
    )


def _repeated_seconds(arrays: LayerArrays, group: GroupSettings, cluster: Hardware, weights: Array) -> Array:
    again, whole = arrays.recomputed(group.remat).work, arrays.forward.operations
    share = np.divide(again.operations, whole, out=np.zeros_like(whole), where=whole > 0)
    return np.add(*_task_seconds(arrays, again, group, cluster, weights * share))


def _exposed(moving: Array, computing: Array, cluster: Hardware) -> Array:
    return np.maximum(moving - computing, 0.0) if cluster.overlaps_gathers else moving


def _gather_over_data(group: GroupSettings, nbytes: Array) -> Array:
    """The seconds to gather values along ``data``, or to sum and scatter them."""
    return group.collectives[DATA].all_gather.seconds(nbytes)


def _task_seconds(
    arrays: LayerArrays, work: TaskWork, group: GroupSettings, cluster: Hardware, weights: Array
) -> tuple[Array, Array]:
    """The seconds of a task's products, and of its other operations, without all-reduces.

    Args:
      weights: bytes of products on each device that do not depend on the rows.
    """
    rows = arrays.rows(group)
    share = rows * product(arrays.shares("activations", group.sizes))
    divided = rows * product(arrays.shares("operations", group.sizes))
    on_device = {
        name: ProductWork(product.operations * divided, product.kernels)
        for name, product in work.products.items()
    }
    of_products = (work.nbytes - work.nbytes_beside) * share + weights
    beside = work.nbytes_beside * share
    return seconds_by_part(cluster, work.operations * divided, of_products, beside, on_device, work.kernels)


def _all_reduces_of_task(arrays: LayerArrays, group: GroupSettings, cluster: Hardware, task: str) -> Array:
    """The seconds of the all-reduces of one microbatch, in a ``forward`` or a ``backward``.

    Gradients have as many bytes for any number of rows. FSDP scatters them unless it gathers once per step.
    """
    shares, shares_of_weights = (arrays.shares(field, group.sizes) for field in ("activations", "weights"))
    seconds = np.zeros(len(arrays.profile.layers))
    for axis, size in enumerate(group.sizes):
        if size > 1:
            others, others_of_weights = (
                product(share for other, share in enumerate(of_field) if other != axis)
                for of_field in (shares, shares_of_weights)
            )
            all_reduces: AllReduces = getattr(arrays.divisions[axis], task)
            nbytes, number = all_reduces.merged(cluster.merges_all_reduces)
            gradients = arrays.divisions[axis].summed_gradients if task == "backward" else 0.0
            nbytes = arrays.rows(group) * np.maximum(nbytes - gradients, 0.0) * others
            if not (group.fsdp and axis == DATA) or group.gather_once:
                nbytes = nbytes + gradients * others_of_weights
            seconds += group.collectives[axis].all_reduce.seconds(nbytes, np.maximum(number, 1.0))
    return seconds


def _all_reduces_of_step(
    arrays: LayerArrays, group: GroupSettings, weights: Array, gradients: Array
) -> Array:
    """The seconds of the all-reduces of gradients after the loop, and of weights that are gathered once.

    Gradients of weights that are divided over ``data`` are summed along it in each microbatch, or with the
    gathered weights.
    """
    axes = [axis for axis in range(len(group.sizes)) if not (group.fsdp and axis == DATA)]
    shares = arrays.shares("weights", group.sizes)
    seconds = np.zeros(len(arrays.profile.layers))
    for axis in axes:
        if group.sizes[axis] > 1:
            others = product(share for other, share in enumerate(shares) if other != axis)
            nbytes = arrays.divisions[axis].reduced_per_step * others
            seconds += group.collectives[axis].all_reduce.seconds(nbytes)
    if group.gather_once:
        seconds = seconds + _gather_over_data(group, weights)
        seconds = seconds + _gather_over_data(group, gradients)
    return seconds


def _optimizer_seconds(arrays: LayerArrays, group: GroupSettings, cluster: Hardware, weights: Array) -> Array:
    """The seconds of the work outside the loop, in proportion to the weights on a device."""
    outside, tied = arrays.profile.outside, arrays.profile.tied
    whole = arrays.of("weights").sum() - sum((len(layers) - 1) * nbytes for layers, nbytes in tied)
    of_products = outside.nbytes - outside.nbytes_beside
    seconds = cluster.seconds(outside.operations, of_products, outside.nbytes_beside)
    divided = group.sizes[DATA] if group.fsdp else 1
    return seconds * weights / divided / whole if whole else np.zeros_like(weights)
