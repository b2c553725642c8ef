"""Costs of the tasks and messages of a plan on a cluster, by the work of its own equations."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from mpmd.ir.plan import Edge, Name, Plan
from mpmd.ir.routes import held_specs
from mpmd.ir.specs import axes_of, num_shards
from mpmd.planner.all_reduces import NO_ALL_REDUCES
from mpmd.planner.collectives import (
    DeviceRange,
    axis_costs,
    group_link,
    shards_on_a_node,
    share_a_node,
)
from mpmd.planner.hardware import Hardware, accesses_to_add, seconds_by_part
from mpmd.planner.pools import AnyCluster
from mpmd.planner.shared_cores import time_alone
from mpmd.planner.submesh import INNERMOST_FIRST
from mpmd.planner.trials.predicted_plan import PredictedPlan
from mpmd.planner.trials.work_on_device import DeviceWork
from mpmd.simulate import Link, MessageBytes


def task_seconds(
    predicted: PredictedPlan, cluster: AnyCluster, device_ranges: Sequence[DeviceRange]
) -> dict[tuple[int, str], float]:
    """The seconds of each executable on each group that runs it, while no other group computes.

    They are the sum of ``hardware.seconds_by_part``, the executable's exchanges and ``task_overhead``.
    """
    return {
        (mpmd_idx, executable.name): time_alone(cluster, device_range.num_devices)
        * (
            _computing(predicted.work[executable.name], pool)
            + all_reduce_seconds(predicted.work[executable.name], pool, device_range)
            + pool.task_overhead
        )
        for mpmd_idx, device_range in enumerate(device_ranges)
        for pool in [cluster.pool(device_range.submesh.pool)]
        for executable in predicted.plan.executables_of(mpmd_idx)
    }


def _computing(work: DeviceWork, pool: Hardware) -> float:
    of_products = work.nbytes - work.nbytes_beside
    saved = work.accumulated * (1 - accesses_to_add(pool) / 3)  # of two reads and a write
    beside = work.nbytes_beside - saved
    parts = seconds_by_part(pool, work.operations, of_products, beside, work.products, work.kernels)
    return float(sum(parts))


def all_reduce_seconds(work: DeviceWork, pool: Hardware, device_range: DeviceRange) -> float:
    """The seconds of a task's collectives: see ``collectives.axis_costs``.

    Weights that are gathered along ``data``, and gradients that are scattered, count only by the time that
    the task's computing does not hide, if the cluster overlaps gathers.
    """
    seconds = 0.0
    for axis, costs in zip(INNERMOST_FIRST, axis_costs(pool, device_range), strict=True):
        if device_range.submesh[axis] == 1:
            continue
        all_reduces = work.all_reduces.get(axis, NO_ALL_REDUCES)
        nbytes, number = all_reduces.merged(pool.merges_all_reduces)
        of_axis = float(costs.all_reduce.seconds(np.asarray(nbytes), float(number)))
        if pool.overlaps_gathers and axis == "data" and nbytes:
            hidden = of_axis * all_reduces.moved / nbytes
            of_axis -= min(hidden, _computing(work, pool))
        seconds += of_axis
    return seconds


def longest_all_reduces(
    predicted: PredictedPlan,
    seconds: Mapping[tuple[int, str], float],
    cluster: AnyCluster,
    device_ranges: Sequence[DeviceRange],
) -> float:
    """The seconds of a step that go into all-reduces, in the group that works longest."""
    of_groups = []
    for group, program in enumerate(predicted.plan.programs):
        runs = collections.Counter(run.executable for run in program.runs)
        pool = cluster.pool(device_ranges[group].submesh.pool)
        busy = sum(count * seconds[group, name] for name, count in runs.items())
        reducing = sum(
            count * all_reduce_seconds(predicted.work[name], pool, device_ranges[group])
            for name, count in runs.items()
        )
        of_groups.append((busy, reducing))
    return max(of_groups)[1]


def edge_links(cluster: AnyCluster, device_ranges: Sequence[DeviceRange]) -> dict[Edge, Link]:
    return {
        (source, target): group_link(cluster, device_ranges[source], device_ranges[target])
        for source, target in itertools.permutations(range(len(device_ranges)), 2)
    }


def message_bytes(plan: Plan, cluster: AnyCluster, device_ranges: Sequence[DeviceRange]) -> MessageBytes:
    """Returns a function for the bytes of a value on the link of an edge: the bytes that a receiving device
    gets.

    Between nodes, the function returns the bytes that all devices of the receiving node get together; a
    part that several devices get counts once.

    Args:
      plan: a plan without open specs.
    """
    avals = plan.avals()
    specs = [held_specs(plan, group, plan.submesh(group)) for group in range(len(device_ranges))]

    @functools.cache
    def nbytes(edge: Edge, name: Name) -> float:
        source, target = (device_ranges[group] for group in edge)
        axes, spec = plan.submesh(edge[1]), specs[edge[1]][name]
        of_device = avals[name].nbytes / num_shards(spec, axes)
        if share_a_node(cluster, source, target):
            return of_device
        return of_device * shards_on_a_node(cluster, target, axes_of(spec))

    return nbytes
