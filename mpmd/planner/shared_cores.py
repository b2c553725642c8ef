"""Costs on devices that share the cores of their node, as CPU devices may.

The rates of a cluster are those while all devices of a node compute; a device is ``Hardware.alone`` times
faster while the others do not.
"""

from __future__ import annotations

import math

import numpy as np

from mpmd.planner.hardware import Amount, Hardware


def time_alone(cluster: Hardware) -> float:
    """The time of a task while no other device computes, over that while all do."""
    return 1 / cluster.alone if _shares(cluster) else 1.0


def time_alone_of(cluster: Hardware, groups: Amount, devices_per_group: float) -> Amount:
    """The time of a task while no other device computes, over that while ``groups`` groups compute."""
    return time_alone(cluster) / time_together(cluster, groups, devices_per_group)


def groups_at_once(cluster: Hardware, devices_per_group: float) -> float:
    """The number of groups that can compute at once as fast as alone; infinite if they share no cores."""
    if not _shares(cluster):
        return math.inf
    return cluster.devices_per_node / cluster.alone / devices_per_group


def time_together(cluster: Hardware, groups: Amount, devices_per_group: float) -> Amount:
    """The time of tasks while ``groups`` groups compute, over that while all devices do."""
    return time_alone(cluster) * np.maximum(1.0, groups / groups_at_once(cluster, devices_per_group))


def _shares(cluster: Hardware) -> bool:
    return cluster.nodes == 1 and cluster.alone > 1
