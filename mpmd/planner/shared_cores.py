"""Costs on devices that share the cores of their node, as CPU devices may.

The rates of a cluster hold while all devices of a node compute. A device is ``Hardware.alone`` times faster
while the others wait; ``of_step`` sets ``alone`` for a step's mix of work, and ``with_devices_at_once`` for
measured tasks. Clusters of several nodes or kinds are treated as if all devices computed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from mpmd.memory import Holding
from mpmd.planner.curves import Amount
from mpmd.planner.hardware import Hardware, products_by_kind
from mpmd.planner.layer_profile import LayerProfile, TaskWork
from mpmd.planner.pools import AnyCluster, Pools
from mpmd.simulate.costs import loads_of


def of_step(cluster: AnyCluster, profiles: Sequence[LayerProfile]) -> AnyCluster:
    """Returns the cluster with ``alone`` weighted by the step's mix of work, from the profiles of its
    loops."""
    if isinstance(cluster, Pools):
        if len(cluster.pools) > 1:
            return cluster
        return dataclasses.replace(cluster, pools=tuple(_of_step(pool, profiles) for pool in cluster.pools))
    return _of_step(cluster, profiles)


def _of_step(pool: Hardware, profiles: Sequence[LayerProfile]) -> Hardware:
    if not pool.alone_of:
        return pool
    together: dict[str, float] = collections.defaultdict(float)
    for task, count in _tasks_of(profiles):
        for kind, seconds in _seconds_by_kind(pool, task).items():
            together[kind] += count * seconds
    alone = sum(seconds / pool.alone_of.get(kind, pool.alone) for kind, seconds in together.items())
    factor = sum(together.values()) / alone if alone else pool.alone
    return dataclasses.replace(pool, alone=float(factor), alone_of={})


def _tasks_of(profiles: Sequence[LayerProfile]) -> Iterator[tuple[TaskWork, float]]:
    """The tasks of a step on one device, with their numbers, by the bytes of ``search/costs.py``."""
    for profile in profiles:
        microbatches = profile.rows / profile.microbatch_rows
        for layer in profile.layers:
            yield _with_bytes(layer.forward, layer.weights, 0), microbatches
            if profile.has_backward:
                read = layer.weights + layer.gradients
                yield _with_bytes(layer.backward, read, 3 * layer.gradients), microbatches
        yield profile.outside, 1.0


def _with_bytes(task: TaskWork, of_products: float, beside: float) -> TaskWork:
    """The task with bytes that do not depend on its rows."""
    nbytes_beside = task.nbytes_beside + beside
    return dataclasses.replace(task, nbytes=task.nbytes + of_products + beside, nbytes_beside=nbytes_beside)


def _seconds_by_kind(cluster: Hardware, task: TaskWork) -> dict[str, float]:
    """The seconds of a task by kind of product, and for ``memory``; see ``hardware.seconds_by_part``."""
    computing = products_by_kind(cluster, task.operations, task.products)
    moving = (task.nbytes - task.nbytes_beside) / cluster.memory_bandwidth
    beside = task.nbytes_beside / cluster.memory_bandwidth
    return {"memory": moving + beside} if moving > sum(computing.values()) else computing | {"memory": beside}


def in_one_process(cluster: Hardware) -> bool:
    """Whether all groups are in one process and share its threads."""
    return cluster.nodes == 1 and cluster.holding is Holding.RECEIVER


def with_devices_at_once(cluster: Hardware, number: float) -> Hardware:
    """The one-node cluster whose devices slow each other down only if more than ``number`` devices
    compute."""
    return dataclasses.replace(cluster, alone=max(1.0, cluster.devices_per_node / number), alone_of={})


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
