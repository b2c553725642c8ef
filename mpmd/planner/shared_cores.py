"""Seconds of tasks on devices that share the cores of their node, as CPU devices may.

The rates of a cluster hold while all devices of a node compute. A device is ``Hardware.alone`` times faster
while the others wait, so ``devices_at_once`` devices compute as fast as one alone. Costs are seconds while no
other device computes; simulations slow groups down while more than ``groups_at_once`` are at work. Clusters
of several nodes or kinds are treated as if all devices computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mpmd.memory import Holding
from mpmd.planner.curves import Amount
from mpmd.planner.hardware import Hardware
from mpmd.planner.pools import AnyCluster


def in_one_process(cluster: Hardware) -> bool:
    """Whether all groups are in one process and share its threads."""
    return cluster.nodes == 1 and cluster.holding is Holding.RECEIVER


def with_devices_at_once(cluster: Hardware, number: float) -> Hardware:
    """The one-node cluster whose devices slow each other down only if more than ``number`` devices
    compute."""
    return dataclasses.replace(cluster, alone=max(1.0, cluster.devices_per_node / number))


def time_alone(cluster: AnyCluster) -> float:
    """The time of a task while no other device computes, over that while all do."""
    pool, *others = cluster.pools
    return 1.0 if others or pool.nodes > 1 else 1 / pool.alone


def devices_at_once(cluster: AnyCluster) -> float:
    """The number of devices that can compute at once as fast as alone; infinite if they share no cores."""
    alone = time_alone(cluster)
    return cluster.pools[0].devices_per_node * alone if alone < 1 else math.inf


def groups_at_once(cluster: AnyCluster, devices: Sequence[int]) -> float:
    """The number of groups that can compute at once, as ``Costs.at_once`` has it.

    Each group counts as the largest one: a mean would let large groups have more of the cores than there are.

    Args:
      devices: the number of each group's.
    """
    return devices_at_once(cluster) / max(devices)


def slowdown(cluster: AnyCluster, devices: Amount) -> Amount:
    """The time of tasks while ``devices`` devices compute, over that while no other device computes."""
    return np.maximum(1.0, devices / devices_at_once(cluster))
