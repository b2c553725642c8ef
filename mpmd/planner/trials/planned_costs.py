"""What the tasks and messages of a plan take on a cluster, by the work of its own equations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from mpmd.ir import Plan
from mpmd.planner.collectives import INNERMOST_FIRST, Place, axis_links, message_link
from mpmd.planner.hardware import Cluster
from mpmd.planner.trials.device_work import DeviceWork
from mpmd.simulate import Link


def task_seconds(
    plan: Plan, work: Mapping[str, DeviceWork], cluster: Cluster, places: Sequence[Place]
) -> dict[tuple[int, str], float]:
    """The seconds of each executable on each group that runs it.

    It computes as ``Cluster.seconds`` says; then come the sums over devices, which nothing hides, and the
    overhead of a task.
    """
    return {
        (place_idx, executable.name): _computing(work[executable.name], cluster)
        + summing_seconds(work[executable.name], cluster, place)
        + cluster.task_overhead
        for place_idx, place in enumerate(places)
        for executable in plan.executables_of(place_idx)
    }


def _computing(work: DeviceWork, cluster: Cluster) -> float:
    of_products = work.nbytes - work.nbytes_beside
    return float(cluster.seconds(work.operations, of_products, work.nbytes_beside))


def summing_seconds(work: DeviceWork, cluster: Cluster, place: Place) -> float:
    """The seconds of a task's sums over devices, in rings: see ``collectives.all_reduce``."""
    seconds = 0.0
    for axis, link in zip(INNERMOST_FIRST, axis_links(cluster, place), strict=True):
        steps = 2 * (place.submesh.get(axis, 1) - 1)
        moved = steps / place.submesh.get(axis, 1) * work.summed.get(axis, 0.0)
        seconds += moved / link.bandwidth + steps * link.latency * work.sums.get(axis, 0)
    return seconds


def longest_summing(
    plan: Plan, work: Mapping[str, DeviceWork], cluster: Cluster, places: Sequence[Place]
) -> float:
    """The seconds of a step in which the group that works longest sums values over its devices."""
    taken = task_seconds(plan, work, cluster, places)
    sums = []
    for group, program in enumerate(plan.programs):
        names = [run.executable for run in program.runs]
        busy = sum(taken[group, name] for name in names)
        sums.append((busy, sum(summing_seconds(work[name], cluster, places[group]) for name in names)))
    return max(sums)[1]


def edge_links(cluster: Cluster, places: Sequence[Place]) -> dict[tuple[int, int], Link]:
    """The link of each edge, for messages with the bytes of whole values.

    Each device of the receiver gets its part of a value over the link of ``collectives.message_link``; along
    ``model`` all of them get the same.
    """
    links = {}
    for source, target in itertools.permutations(range(len(places)), 2):
        link = message_link(cluster, places[source], places[target])
        place = places[target]
        parts = place.num_devices // place.submesh.get("model", 1)
        links[source, target] = Link(link.latency, link.bandwidth * parts)
    return links
