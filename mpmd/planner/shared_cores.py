"""Costs on devices that share the cores of their node, as CPU devices may.

The rates of a cluster are those while all devices of a node compute; a device is ``Cluster.alone`` times
faster while the others do not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from mpmd.planner.hardware import Amount, Cluster
from mpmd.simulate import Costs


def of_busy_devices(costs: Costs, cluster: Cluster, devices_per_group: float) -> Costs:
    """The costs of tasks whose times are those while all devices of the node compute.

    On one node whose devices share cores, each task is faster while others do not compute.
    """
    share = time_alone(cluster)

    def shorter(times: Mapping) -> dict:
        return {key: time * share for key, time in times.items()}

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
    return dataclasses.replace(costs, at_once=groups_at_once(cluster, devices_per_group))


def time_alone(cluster: Cluster) -> float:
    """The time of a task while no other device computes, over that while all do."""
    return 1 / cluster.alone if _shares(cluster) else 1.0


def groups_at_once(cluster: Cluster, devices_per_group: float) -> float:
    """How many groups can be at work at once, each as fast as alone; infinite if they share nothing."""
    if not _shares(cluster):
        return math.inf
    return cluster.devices_per_node / cluster.alone / devices_per_group


def time_together(cluster: Cluster, groups: Amount, devices_per_group: float) -> Amount:
    """The time of tasks while so many groups are at work, over that while all devices are."""
    return time_alone(cluster) * np.maximum(1.0, groups / groups_at_once(cluster, devices_per_group))


def _shares(cluster: Cluster) -> bool:
    return cluster.nodes == 1 and cluster.alone > 1
