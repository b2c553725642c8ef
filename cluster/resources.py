"""Reserves resources for the groups on the cluster, or says what is missing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

_QUIET_SECONDS = 2.0
"""How long ``reserve`` waits before it prints that it waits."""


def fitting_cpus(cpus_of_nodes: Sequence[float], num_groups: int) -> float:
    """The CPUs to request for each group: one, or the largest 1/k with which all groups fit on the nodes."""
    if not any(cpus_of_nodes):
        return 1.0
    k = 1
    while sum(int(cpus * k) for cpus in cpus_of_nodes) < num_groups:
        k += 1
    return int(10_000 / k) / 10_000  # Ray counts in ten-thousandths


def live_nodes() -> list[Mapping]:
    """The cluster's nodes, as ``ray.nodes`` describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def reserve(bundle: Mapping[str, float], num_groups: int, timeout: float) -> PlacementGroup:
    """Reserves ``bundle`` once per group, each on one node, few nodes preferred.

    Raises: ``RuntimeError`` when that is not possible within ``timeout`` seconds; it says what was requested
      and what is available. Nothing stays reserved then.
    """
    available = ray.available_resources()
    bundles = [dict(bundle) for _ in range(num_groups)]
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(min(timeout, _QUIET_SECONDS)):
            shortage = describe_shortage(bundle, num_groups, available, live_nodes())
            waits = max(timeout - _QUIET_SECONDS, 0)
            print(f"cluster.launch: waiting up to {timeout:g} s. {shortage}", file=sys.stderr)
            if not _wait(group, waits):
                raise RuntimeError(f"no room for the groups within {timeout:g} s. {shortage}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _wait(group: PlacementGroup, seconds: float) -> bool:
    # One second at a time, because a keyboard interrupt takes effect only between two waits.
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if group.wait(min(left, 1.0)):
            return True
    return False


def describe_shortage(
    bundle: Mapping[str, float], num_groups: int, available: Mapping[str, float], nodes: Sequence[Mapping]
) -> str:
    """For each resource, what the groups request and what the cluster has."""
    lines = []
    for name, amount in bundle.items():
        asked = amount * num_groups
        total = sum(node["Resources"].get(name, 0) for node in nodes)
        free = available.get(name, 0)
        missing = f", {asked - free:g} missing" if asked > free else ""
        lines.append(f"  {name}: {asked:g} asked, {free:g} available of {total:g}{missing}")
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    have = "; ".join(
        ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in bundle) for node in nodes[:8]
    )
    more = f"; and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return "\n".join(
        [
            f"{num_groups} groups of {each} each, every one on one node:",
            *lines,
            f"  nodes: {have}{more}",
        ]
    )


def nodes_of_bundles(group: PlacementGroup) -> list[str]:
    """The node of each bundle, by Ray's identifier."""
    placed = placement_group_table(group)["bundles_to_node_id"]
    return [placed[index] for index in range(len(placed))]


def assign_bundles(nodes: Sequence[str], per_group: int) -> list[int]:
    """A bundle for each process of each group: the processes of a group on one node where that can be.

    Args:
      nodes: of each bundle.
      per_group: the number of processes of each group.
    """
    by_node: dict[str, list[int]] = {}
    for bundle, node in enumerate(nodes):
        by_node.setdefault(node, []).append(bundle)
    whole = {node: len(bundles) // per_group * per_group for node, bundles in by_node.items()}
    together = [bundle for node, bundles in by_node.items() for bundle in bundles[: whole[node]]]
    rest = [bundle for node, bundles in by_node.items() for bundle in bundles[whole[node] :]]
    return [*together, *rest]


def threads_per_process(nodes: Sequence[str]) -> list[int]:
    """For each process, its share of the CPUs of its node, at least one.

    Args:
      nodes: of each process.
    """
    cpus = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in live_nodes()}
    return [max(1, int(cpus[node]) // nodes.count(node)) for node in nodes]
