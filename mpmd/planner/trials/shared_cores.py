"""Costs on devices that share the cores of their node, as CPU devices may."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpmd.planner.hardware import Cluster
from mpmd.simulate import Costs


def of_busy_devices(costs: Costs, cluster: Cluster, devices_per_group: float) -> Costs:
    """The costs of tasks whose times are those while all devices of the node compute.

    On one node whose devices share cores, each task is faster while others do not compute.
    """
    if not _shares(cluster):
        return costs

    def shorter(times: Mapping) -> dict:
        return {key: time / cluster.alone for key, time in times.items()}

    alone = dataclasses.replace(
        costs,
        kinds=shorter(costs.kinds),
        tasks=shorter(costs.tasks),
        fused=shorter(costs.fused),
        outside=shorter(costs.outside),
    )
    return of_lone_devices(alone, cluster, devices_per_group)


def of_lone_devices(costs: Costs, cluster: Cluster, devices_per_group: float) -> Costs:
    """The same for tasks whose times are those while no other device computes."""
    if not _shares(cluster):
        return costs
    at_once = cluster.devices_per_node / cluster.alone / devices_per_group
    return dataclasses.replace(costs, at_once=at_once)


def _shares(cluster: Cluster) -> bool:
    return cluster.nodes == 1 and cluster.alone > 1
