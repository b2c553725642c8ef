"""Seconds of tasks on devices that share the cores of their node, as CPU devices may.

The rates of a cluster hold while all devices of a node compute. A device is ``Hardware.alone`` times faster
while the rest of the node waits, so ``devices_at_once`` devices compute as fast as one alone. Costs are
seconds while no other group computes; simulations slow groups down while more than ``groups_at_once`` are at
work. Clusters of several nodes or kinds are treated as if all devices computed.
"""

from __future__ import annotations

import math

import numpy as np

from mpmd.planner.curves import Amount
from mpmd.planner.pools import AnyCluster


def devices_at_once(cluster: AnyCluster) -> float:
    """The number of devices that can compute at once as fast as alone; infinite if they share no cores."""
    pool, *others = cluster.pools
    shares = not others and pool.nodes == 1 and pool.alone > 1
    return pool.devices_per_node / pool.alone if shares else math.inf


def time_alone(cluster: AnyCluster, devices: float) -> float:
    """The time of a task while ``devices`` devices compute, over its time while all devices do."""
    at_once = devices_at_once(cluster)
    return 1.0 if math.isinf(at_once) else max(at_once, devices) / cluster.pools[0].devices_per_node


def groups_at_once(cluster: AnyCluster, devices: Amount) -> Amount:
    """The number of groups that can compute at once as fast as alone, as ``Costs.at_once`` has it.

    Args:
      devices: the mean number of devices of a group.
    """
    return np.maximum(1.0, devices_at_once(cluster) / devices)
