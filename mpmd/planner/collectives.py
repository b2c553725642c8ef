"""Costs of exchanges between devices: along the axes of a group's submesh, and between groups.

Groups are on consecutive devices of their pool, node after node. Within a group the axis ``model`` is
innermost, then comes ``sequence``, then ``data``, as in Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473, section 3: devices that exchange
most are on one node.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection
from typing import NamedTuple, get_args

import numpy as np

from mpmd.planner.curves import CollectiveKind, collective_name, size_of_collective
from mpmd.planner.hardware import Hardware
from mpmd.planner.pools import AnyCluster, Pools
from mpmd.planner.submesh import INNERMOST_FIRST, Submesh
from mpmd.simulate import Link


@dataclasses.dataclass(frozen=True)
class DeviceRange:
    """The devices of a group: from device ``start`` of its pool on, as many as ``submesh`` has."""

    start: int
    submesh: Submesh

    @property
    def num_devices(self) -> int:
        return self.submesh.num_devices

    @property
    def stop(self) -> int:
        return self.start + self.num_devices


def device_ranges_of(submeshes: tuple[Submesh, ...]) -> tuple[DeviceRange, ...]:
    device_ranges, starts = [], collections.Counter[str]()
    for submesh in submeshes:
        device_ranges.append(DeviceRange(starts[submesh.pool], submesh))
        starts[submesh.pool] = device_ranges[-1].stop
    return tuple(device_ranges)


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """The cost of collectives of one kind along an axis.

    Attributes:
      per_byte: seconds for each byte of the whole value.
      each: seconds of each collective, in addition to the seconds of its bytes.
    """

    per_byte: float
    each: float

    def seconds(self, nbytes: np.ndarray, number: np.ndarray | float = 1.0) -> np.ndarray:
        return np.where(nbytes > 0, nbytes * self.per_byte + number * self.each, 0.0)


class AxisCosts(NamedTuple):
    """The costs of collectives along an axis; a reduction that scatters takes as long as ``all_gather``."""

    all_reduce: CollectiveCost
    all_gather: CollectiveCost


def axis_costs(pool: Hardware, device_range: DeviceRange) -> tuple[AxisCosts, ...]:
    """The costs of collectives along each axis, ``INNERMOST_FIRST``, on the slowest ring of the axis.

    Within a node the curves of the pool's ``rates`` count, and without a curve the times of a ring.
    Rings that leave a node share its link: as many rings as the node has devices that no ring joins.

    Args:
      pool: in which the devices are.
    """
    costs, stride = [], 1
    for axis in INNERMOST_FIRST:
        size = device_range.submesh[axis]
        block = stride * size
        starts = range(device_range.start, device_range.stop, block)
        if all(_same_node(pool, first, first + block) for first in starts):
            costs.append(AxisCosts(*(_on_a_node(pool, kind, size) for kind in get_args(CollectiveKind))))
        else:
            rings = min(stride, pool.devices_per_node)
            link = Link(pool.node_link.latency, pool.node_link.bandwidth / rings)
            costs.append(
                AxisCosts(*(_in_a_ring(pool, kind, size, link) for kind in get_args(CollectiveKind)))
            )
        stride = block
    return tuple(costs)


def _on_a_node(pool: Hardware, kind: CollectiveKind, size: int) -> CollectiveCost:
    """By the curve of the nearest number of devices, in proportion to messages and bytes of a ring."""
    sizes = [of for name in pool.rates for of in [size_of_collective(name, kind)] if of]
    if not sizes or size == 1:
        return _in_a_ring(pool, kind, size, pool.device_link)
    nearest = min(sizes, key=lambda of: (abs(of - size), of))
    curve = pool.rates[collective_name(kind, nearest)]
    messages, moved = (size - 1) / (nearest - 1), (1 - 1 / size) / (1 - 1 / nearest)
    return CollectiveCost(moved / curve.rate, messages * curve.half / curve.rate)


def _in_a_ring(pool: Hardware, kind: CollectiveKind, size: int, link: Link) -> CollectiveCost:
    """Returns the cost of a collective in a ring. In an all-reduce each link moves ``2 (n - 1) / n`` of the
    bytes, in ``2 (n - 1)`` messages.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009. A
    gather takes half of an all-reduce, and so does a reduction that scatters.
    """
    if size == 1:
        return CollectiveCost(0.0, 0.0)
    messages = (2 if kind == "all_reduce" else 1) * (size - 1)
    return CollectiveCost(messages / size / link.bandwidth, messages * link.latency + pool.collective_floor)


def message_link(cluster: AnyCluster, source: DeviceRange, target: DeviceRange) -> Link:
    """The link of a message between two groups, for the bytes that a device of the target receives.

    Within a node each device has a link of its own. Between nodes the devices of a node share one, over which
    each shard of a value comes once, however many devices receive it.
    """
    if (source.start, source.submesh.pool) == (target.start, target.submesh.pool):
        return Link()
    link = group_link(cluster, source, target)
    if share_a_node(cluster, source, target):
        return link
    on_a_node = min(target.num_devices, cluster.pool(target.submesh.pool).devices_per_node)
    shards = max(1, on_a_node // target.submesh.model)
    return Link(link.latency, link.bandwidth / shards)


def group_link(cluster: AnyCluster, source: DeviceRange, target: DeviceRange) -> Link:
    if isinstance(cluster, Pools) and source.submesh.pool != target.submesh.pool:
        return cluster.link
    pool = cluster.pool(target.submesh.pool)
    return pool.device_link if share_a_node(cluster, source, target) else pool.node_link


def share_a_node(cluster: AnyCluster, source: DeviceRange, target: DeviceRange) -> bool:
    if source.submesh.pool != target.submesh.pool:
        return False
    pool = cluster.pool(source.submesh.pool)
    return _same_node(pool, min(source.start, target.start), max(source.stop, target.stop))


def shards_on_a_node(cluster: AnyCluster, device_range: DeviceRange, divided: Collection[str]) -> int:
    """The number of shards of a value that the devices of one node receive together.

    Where a group begins within a node, it is the number for a group that begins at the start of a node.

    Args:
      divided: the axes along which the value is divided.
    """
    of_node = cluster.pool(device_range.submesh.pool).devices_per_node
    shards, left = 1, min(device_range.num_devices, of_node)
    for kind in INNERMOST_FIRST:
        size = device_range.submesh[kind]
        if kind in divided:
            shards *= min(size, left)
        left = max(1, left // size)
    return shards


def _same_node(pool: Hardware, start: int, stop: int) -> bool:
    return start // pool.devices_per_node == (stop - 1) // pool.devices_per_node
