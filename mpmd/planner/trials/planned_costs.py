"""Costs of the tasks and messages of a plan on a cluster, by the work of its own equations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from mpmd.ir.plan import Edge, Name, Plan
from mpmd.ir.routes import held_specs
from mpmd.ir.specs import axes_of, num_shards
from mpmd.planner.collectives import DeviceRange, axis_links, shards_on_a_node, share_a_node
from mpmd.planner.hardware import Hardware
from mpmd.planner.submesh import INNERMOST_FIRST
from mpmd.planner.trials.device_work import DeviceWork
from mpmd.simulate import Link, MessageBytes


def task_seconds(
    plan: Plan, work: Mapping[str, DeviceWork], cluster: Hardware, device_ranges: Sequence[DeviceRange]
) -> dict[tuple[int, str], float]:
    """The seconds of each executable on each group that runs it.

    They are those of ``Hardware.seconds``, of the executable's all-reduces, which nothing hides, and of the
    overhead of a task.
    """
    return {
        (mpmd_idx, executable.name): _computing(work[executable.name], cluster)
        + all_reduce_seconds(work[executable.name], cluster, device_range)
        + cluster.task_overhead
        for mpmd_idx, device_range in enumerate(device_ranges)
        for executable in plan.executables_of(mpmd_idx)
    }


def _computing(work: DeviceWork, cluster: Hardware) -> float:
    of_products = work.nbytes - work.nbytes_beside
    return float(cluster.seconds(work.operations, of_products, work.nbytes_beside))


def all_reduce_seconds(work: DeviceWork, cluster: Hardware, device_range: DeviceRange) -> float:
    """The seconds of a task's all-reduces, in rings: see ``collectives.all_reduce``."""
    seconds = 0.0
    for axis, link in zip(INNERMOST_FIRST, axis_links(cluster, device_range), strict=True):
        steps = 2 * (device_range.submesh.get(axis, 1) - 1)
        moved = steps / device_range.submesh.get(axis, 1) * work.all_reduced.get(axis, 0.0)
        seconds += moved / link.bandwidth + steps * link.latency * work.all_reduces.get(axis, 0)
    return seconds


def longest_all_reduces(
    plan: Plan, work: Mapping[str, DeviceWork], cluster: Hardware, device_ranges: Sequence[DeviceRange]
) -> float:
    """The seconds of a step that go into all-reduces, in the group that works longest."""
    seconds = task_seconds(plan, work, cluster, device_ranges)
    of_groups = []
    for group, program in enumerate(plan.programs):
        names = [run.executable for run in program.runs]
        busy = sum(seconds[group, name] for name in names)
        of_groups.append(
            (busy, sum(all_reduce_seconds(work[name], cluster, device_ranges[group]) for name in names))
        )
    return max(of_groups)[1]


def edge_links(cluster: Hardware, device_ranges: Sequence[DeviceRange]) -> dict[Edge, Link]:
    """The link of each edge: that of a device within a node, and between nodes that of the node."""
    return {
        (source, target): (
            cluster.device_link
            if share_a_node(cluster, device_ranges[source], device_ranges[target])
            else cluster.node_link
        )
        for source, target in itertools.permutations(range(len(device_ranges)), 2)
    }


def message_bytes(plan: Plan, cluster: Hardware, device_ranges: Sequence[DeviceRange]) -> MessageBytes:
    """The bytes of a value on the link of an edge: those that a device of the receiver gets.

    Between nodes they are those that the devices of a node get together; parts that several of them get count
    once.

    Args:
      plan: without open specs.
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
