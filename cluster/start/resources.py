"""Reserves resources for the groups on the cluster, or reports the missing resources."""

from __future__ import annotations

import collections
import contextlib
import gc
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from cluster.ray_compat import actor_is_dead

_QUIET_SECONDS = 2.0
"""The seconds that ``reserve`` waits before it prints that it waits."""

_TAKEN_SECONDS = 5.0
"""The seconds in which Ray reserves resources that were free before, unless somebody else has taken these."""

_NO_ACTOR = "-"
"""The actor's place in a placement group's name if the driver of the mesh is the driver of the job."""

ACCELERATOR_TYPE = "accelerator_type:"
"""The beginning of the name of the resource that stands for a node's accelerator type.

The name of the type follows; Ray gives the node an amount of 1.
"""

NODE_LABEL = "ray.io/node-id"


def fitting_cpus(cpus_of_nodes: Sequence[float], num_processes: int) -> float:
    """The CPUs to request for each process: one, or the largest 1/k with which all fit on the nodes."""
    if not any(cpus_of_nodes):
        return 1.0
    k = 1
    while sum(int(cpus * k) for cpus in cpus_of_nodes) < num_processes:
        k += 1
    return int(10_000 / k) / 10_000  # Ray counts in ten-thousandths


def live_nodes() -> list[Mapping]:
    return [node for node in ray.nodes() if node["Alive"]]


Bundle = Mapping[str, float]
"""Resources of one node, by Ray's names."""


def reserve(bundles: Sequence[Bundle], timeout: float) -> PlacementGroup:
    """Reserves the bundles, one for each process, on few nodes if possible.

    Raises: ``RuntimeError`` when that is not possible within ``timeout`` seconds, or at once when meshes of
      this program are in the way; its text has the requested and the available resources. Nothing stays
      reserved then.
    """
    remove_left_behind()
    available = ray.available_resources()
    group = request(bundles)
    try:
        if not group.wait(min(timeout, _QUIET_SECONDS)):
            shortage = describe_shortage(bundles, available, live_nodes())
            if held := held_by_this_program(bundles, live_nodes(), placement_group_table().values()):
                gc.collect()  # a mesh that nobody uses any more may be part of a cycle
                if not group.wait(min(timeout, _QUIET_SECONDS)):
                    raise RuntimeError(f"no room for the groups: {held}{shortage}")
            waits = max(timeout - _QUIET_SECONDS, 0)
            print(f"mpmd.launch: waiting up to {timeout:g} s. {shortage}", file=sys.stderr)
            if not _wait(group, waits):
                raise RuntimeError(f"no room for the groups within {timeout:g} s. {shortage}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def request(bundles: Sequence[Bundle], avoided: Collection[str] = ()) -> PlacementGroup:
    """Requests bundles on few nodes, and on no node of ``avoided``. Does not wait for the bundles."""
    selector = {NODE_LABEL: f"!in({','.join(sorted(avoided))})"} if avoided else {}
    return _requested(bundles, [selector] * len(bundles) if selector else None)


def _requested(bundles: Sequence[Bundle], selectors: list[dict[str, str]] | None) -> PlacementGroup:
    return placement_group(
        [dict(bundle) for bundle in bundles],
        strategy="PACK",
        name=f"{_names_of_this_program()}{uuid.uuid4().hex}",
        bundle_label_selector=selectors,
    )


def _names_of_this_program() -> str:
    """The beginning of the names of the placement groups that this process has requested.

    A job may have several drivers of meshes, such as the trials of Ray Tune, and each closes its own.
    """
    context = ray.get_runtime_context()
    return f"mpmd {context.get_job_id()} {context.get_actor_id() or _NO_ACTOR} {context.get_worker_id()} "


def remove_left_behind() -> None:
    """Gives back the reservations of drivers of this job that were actors and have died.

    Ray keeps the placement groups of a dead actor until its job ends. So a trial of Ray Tune that was killed
    would leave less room to later trials.
    """
    job = ray.get_runtime_context().get_job_id()
    for table in placement_group_table().values():
        owner = _actor_of(table["name"], job)
        if table["state"] != "REMOVED" and owner is not None and actor_is_dead(owner):
            with contextlib.suppress(ValueError):  # another driver of the job has given it back meanwhile
                remove_placement_group(get_placement_group(table["name"]))


def _actor_of(name: str, job: str) -> str | None:
    match name.split(" "):
        case ["mpmd", owner, actor, _, _] if owner == job and actor != _NO_ACTOR:
            return actor
    return None


def held_by_this_program(
    bundles: Sequence[Bundle], nodes: Sequence[Mapping], groups: Iterable[Mapping]
) -> str:
    """Advice where bundles would fit, were it not for meshes that this program has not closed.

    Args:
      bundles: the requested resources.
      nodes: the nodes of the cluster, as ``ray.nodes`` describes them.
      groups: the placement groups of the cluster, as ``placement_group_table`` describes them.

    Returns: the empty text where the bundles fit beside all placement groups, as when the groups of a closed
      mesh are just being given back, or would not fit without these meshes either.
    """
    ours, others = collections.Counter[str](), collections.Counter[str]()
    for group in groups:
        if group["state"] == "CREATED":
            holders = ours if group["name"].startswith(_names_of_this_program()) else others
            for bundle in group["bundles"].values():
                holders.update(bundle)
    asked, total = collections.Counter[str](), collections.Counter[str]()
    for bundle in bundles:
        asked.update(bundle)
    for node in nodes:
        total.update(node["Resources"])
    short = sorted(name for name in asked if asked[name] > total[name] - others[name] - ours[name])
    if not short or any(asked[name] > total[name] - others[name] for name in short):
        return ""
    amounts = ", ".join(f"{ours[name]:g} {name}" for name in short)
    return (
        f"meshes that this program has launched and not closed hold {amounts}: close them first, by "
        "mesh.close() or by leaving `with mpmd.launch(...) as mesh`, or ask for less (cpus_per_group). "
    )


class Reservation(NamedTuple):
    placement_group: PlacementGroup
    bundle_index: int


class SharedDevices(NamedTuple):
    """The node and the devices of the process ``host``; ``accelerators`` are Ray's device names."""

    node_id: str
    host: int
    accelerators: tuple[str, ...]


Allocation = Reservation | SharedDevices


def reserve_together(
    bundles: Sequence[Bundle], teams: Sequence[Sequence[int]], timeout: float
) -> tuple[list[Reservation], list[str]]:
    """Reserves a bundle for each process, all in one placement group; a team on one node if possible.

    Args:
      bundles: the bundle of each process.
      teams: the numbers of the processes that belong together; each number is in one team.

    Returns: the allocation of each process, and its node.
    Raises: as ``reserve``.
    """
    group = reserve(bundles, timeout)
    placed = placement_group_table(group)["bundles_to_node_id"]
    nodes = [placed[index] for index in range(len(placed))]
    size_of = {number: len(team) for team in teams for number in team}
    indices = assign_bundles(nodes, bundles, [size_of[number] for number in range(len(bundles))])
    return [Reservation(group, index) for index in indices], [nodes[index] for index in indices]


def reserve_separately(
    bundles: Sequence[Bundle], teams: Sequence[Sequence[int]], timeout: float
) -> tuple[list[Reservation], list[str]]:
    """As ``reserve_together``, with a placement group for each team, which can be given back by itself."""
    deadline = time.monotonic() + timeout
    while True:
        # What fits is known to Ray alone, and it puts on few nodes only what is asked for at once.
        together, nodes = reserve_together(bundles, teams, max(deadline - time.monotonic(), 0.0))
        remove_placement_group(together[0].placement_group)
        groups = [
            _requested([bundles[number] for number in team], [{NODE_LABEL: nodes[number]} for number in team])
            for team in teams
        ]
        try:
            are_there = all(_wait(group, _TAKEN_SECONDS) for group in groups)
        except BaseException:
            remove_all(groups)
            raise
        if are_there:
            allocations = {
                number: Reservation(group, index)
                for group, team in zip(groups, teams, strict=True)
                for index, number in enumerate(team)
            }
            return [allocations[number] for number in range(len(bundles))], nodes
        remove_all(groups)  # somebody else was faster


def remove_all(groups: Iterable[PlacementGroup]) -> None:
    """Gives the resources back, and ends the actors that use them."""
    for group in groups:
        remove_placement_group(group)


def _wait(group: PlacementGroup, seconds: float) -> bool:
    # One second at a time, because a keyboard interrupt takes effect only between two waits.
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if group.wait(min(left, 1.0)):
            return True
    return False


def describe_shortage(
    bundles: Sequence[Bundle], available: Mapping[str, float], nodes: Sequence[Mapping]
) -> str:
    lines = []
    names = list(dict.fromkeys(name for bundle in bundles for name in bundle))
    for name in names:
        asked = sum(bundle.get(name, 0) for bundle in bundles)
        total = sum(node["Resources"].get(name, 0) for node in nodes)
        free = available.get(name, 0)
        missing = f", {asked - free:g} missing" if asked > free else ""
        lines.append(f"  {name}: {asked:g} asked, {free:g} available of {total:g}{missing}")
    counts = collections.Counter(", ".join(f"{n:g} {name}" for name, n in b.items()) for b in bundles)
    for name in names:
        most = max(bundle.get(name, 0) for bundle in bundles)
        if nodes and most > max(node["Resources"].get(name, 0) for node in nodes):
            lines.append(f"  no node has {most:g} {name}: ask for less, or have more processes_per_group")
    asked_for = "; ".join(
        f"{count} process{'es' if count > 1 else ''} of {bundle} each" for bundle, count in counts.items()
    )
    have = "; ".join(
        ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in names) for node in nodes[:8]
    )
    more = f"; and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return "\n".join(
        [
            f"{asked_for}, every one on one node:",
            *lines,
            f"  nodes: {have}{more}",
        ]
    )


def assign_bundles(nodes: Sequence[str], bundles: Sequence[Bundle], counts: Sequence[int]) -> list[int]:
    """The index of a bundle for each process: the processes of a group on one node where that can be.

    Args:
      nodes: of each bundle.
      bundles: one for each process; it gets this one, or one that is equal.
      counts: for each process, how many its group has.
    """
    alike: dict[tuple, list[int]] = {}
    for index, (bundle, count) in enumerate(zip(bundles, counts, strict=True)):
        alike.setdefault((count, *bundle.items()), []).append(index)
    assigned = [0] * len(bundles)
    for (count, *_), indices in alike.items():
        for process, bundle_index in zip(indices, _by_node(indices, nodes, count), strict=True):
            assigned[process] = bundle_index
    return assigned


def _by_node(indices: Sequence[int], nodes: Sequence[str], per_group: int) -> list[int]:
    """The indices in an order in which as many whole groups as possible are on one node each."""
    by_node: dict[str, list[int]] = {}
    for index in indices:
        by_node.setdefault(nodes[index], []).append(index)
    whole = {node: len(bundles) // per_group * per_group for node, bundles in by_node.items()}
    together = [bundle for node, bundles in by_node.items() for bundle in bundles[: whole[node]]]
    rest = [bundle for node, bundles in by_node.items() for bundle in bundles[whole[node] :]]
    return [*together, *rest]


def threads_per_process(nodes: Sequence[str]) -> list[int]:
    cpus = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in live_nodes()}
    return [max(1, int(cpus[node]) // nodes.count(node)) for node in nodes]
