"""Costs on devices that share the cores of their node, as CPU devices may.

The rates of a cluster are those while all devices of a node compute; a device is ``Hardware.alone`` times
faster while the others do not. In clusters of several nodes or kinds it counts as if all computed.
"""

from __future__ import annotations

import math

import numpy as np

from mpmd.planner.hardware import Amount
from mpmd.planner.pools import AnyCluster


def time_alone(cluster: AnyCluster) -> float:
    """The time of a task while no other device computes, over that while all do."""
    return 1 / cluster.pools[0].alone if _shares(cluster) else 1.0


def time_alone_of(cluster: AnyCluster, groups: Amount, devices_per_group: float) -> Amount:
    """The time of a task while no other device computes, over that while ``groups`` groups compute."""
    return time_alone(cluster) / time_together(cluster, groups, devices_per_group)


def groups_at_once(cluster: AnyCluster, devices_per_group: float) -> float:
    """The number of groups that can compute at once as fast as alone; infinite if they share no cores."""
    if not _shares(cluster):
        return math.inf
    pool = cluster.pools[0]
    return pool.devices_per_node / pool.alone / devices_per_group


def time_together(cluster: AnyCluster, groups: Amount, devices_per_group: float) -> Amount:
    """The time of tasks while ``groups`` groups compute, over that while all devices do."""
    return time_alone(cluster) * np.maximum(1.0, groups / groups_at_once(cluster, devices_per_group))


def _shares(cluster: AnyCluster) -> bool:
    pool = cluster.pools[0]
    return len(cluster.pools) == 1 and pool.nodes == 1 and pool.alone > 1
