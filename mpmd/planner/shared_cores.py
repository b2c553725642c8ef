"""Costs on devices that share the cores of their node, as CPU devices may.

The rates of a cluster are those while all devices of a node compute; a device is ``Hardware.alone`` times
faster while the others do not. In clusters of several nodes or kinds it counts as if all computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpmd.planner.hardware import Amount
from mpmd.planner.pools import AnyCluster
from mpmd.simulate.costs import loads_of


def time_alone(cluster: AnyCluster) -> float:
    """The time of a task while no other device computes, over that while all do."""
    return 1 / cluster.pools[0].alone if _shares(cluster) else 1.0


def time_alone_of(cluster: AnyCluster, devices: Amount) -> Amount:
    """The time of a task while no other device computes, over that while ``devices`` devices compute."""
    return time_alone(cluster) / time_together(cluster, devices)


def devices_at_once(cluster: AnyCluster) -> float:
    """The number of devices that can compute at once as fast as alone; infinite if they share no cores."""
    pool = cluster.pools[0]
    return pool.devices_per_node / pool.alone if _shares(cluster) else math.inf


def sharing(cluster: AnyCluster, devices: Sequence[int]) -> tuple[float, tuple[float, ...]]:
    """The number of groups that can compute at once, and the loads of groups, as ``Costs`` has both.

    Args:
      devices: the number of each group's.
    """
    mean = sum(devices) / len(devices)
    return devices_at_once(cluster) / mean, loads_of(devices, mean)


def time_together(cluster: AnyCluster, devices: Amount) -> Amount:
    """The time of tasks while ``devices`` devices compute, over that while all do."""
    return time_alone(cluster) * np.maximum(1.0, devices / devices_at_once(cluster))


def _shares(cluster: AnyCluster) -> bool:
    pool = cluster.pools[0]
    return len(cluster.pools) == 1 and pool.nodes == 1 and pool.alone > 1
