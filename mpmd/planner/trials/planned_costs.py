"""What the tasks and messages of a plan take on a cluster, by the work of its own equations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from mpmd.ir.plan import Edge, Name, Plan
from mpmd.ir.routes import held_specs
from mpmd.ir.specs import axes_of, num_parts
from mpmd.planner.collectives import INNERMOST_FIRST, Place, axis_links, parts_on_a_node, share_a_node
from mpmd.planner.hardware import Hardware
from mpmd.planner.trials.device_work import DeviceWork
from mpmd.simulate import Link, MessageBytes


def task_seconds(
    plan: Plan, work: Mapping[str, DeviceWork], cluster: Hardware, places: Sequence[Place]
) -> dict[tuple[int, str], float]:
    """The seconds of each executable on each group that runs it.

    It computes as ``Hardware.seconds`` says; then come the sums over devices, which nothing hides, and the
    overhead of a task.
    """
    return {
        (place_idx, executable.name): _computing(work[executable.name], cluster)
        + summing_seconds(work[executable.name], cluster, place)
        + cluster.task_overhead
        for place_idx, place in enumerate(places)
        for executable in plan.executables_of(place_idx)
    }


def _computing(work: DeviceWork, cluster: Hardware) -> float:
    of_products = work.nbytes - work.nbytes_beside
    return float(cluster.seconds(work.operations, of_products, work.nbytes_beside))


def summing_seconds(work: DeviceWork, cluster: Hardware, place: Place) -> float:
    """The seconds of a task's sums over devices, in rings: see ``collectives.all_reduce``."""
    seconds = 0.0
    for axis, link in zip(INNERMOST_FIRST, axis_links(cluster, place), strict=True):
        steps = 2 * (place.submesh.get(axis, 1) - 1)
        moved = steps / place.submesh.get(axis, 1) * work.summed.get(axis, 0.0)
        seconds += moved / link.bandwidth + steps * link.latency * work.sums.get(axis, 0)
    return seconds


def longest_summing(
    plan: Plan, work: Mapping[str, DeviceWork], cluster: Hardware, places: Sequence[Place]
) -> float:
    """The seconds of a step in which the group that works longest sums values over its devices."""
    taken = task_seconds(plan, work, cluster, places)
    sums = []
    for group, program in enumerate(plan.programs):
        names = [run.executable for run in program.runs]
        busy = sum(taken[group, name] for name in names)
        sums.append((busy, sum(summing_seconds(work[name], cluster, places[group]) for name in names)))
    return max(sums)[1]


def edge_links(cluster: Hardware, places: Sequence[Place]) -> dict[Edge, Link]:
    """The link of each edge: that of a device within a node, and between nodes that of the node."""
    return {
        (source, target): (
            cluster.device_link
            if share_a_node(cluster, places[source], places[target])
            else cluster.node_link
        )
        for source, target in itertools.permutations(range(len(places)), 2)
    }


def message_bytes(plan: Plan, cluster: Hardware, places: Sequence[Place]) -> MessageBytes:
    """The bytes that a value has on the link of an edge: those that a device of the receiver gets.

    Between nodes they are those that the devices of a node get together; what several of them get comes once.

    Args:
      plan: without open specs.
    """
    avals = plan.avals()
    specs = [held_specs(plan, group, plan.submesh(group)) for group in range(len(places))]

    @functools.cache
    def nbytes(edge: Edge, name: Name) -> float:
        source, target = (places[group] for group in edge)
        axes, spec = plan.submesh(edge[1]), specs[edge[1]][name]
        of_device = avals[name].nbytes / num_parts(spec, axes)
        if share_a_node(cluster, source, target):
            return of_device
        return of_device * parts_on_a_node(cluster, target, axes_of(spec))

    return nbytes
