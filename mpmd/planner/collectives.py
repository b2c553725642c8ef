"""Costs of exchanges between devices: along the axes of a group's submesh, and between groups.

Groups are on consecutive devices, node after node. Within a group the axis ``model`` is innermost, then comes
``sequence``, then ``data``, as in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", 2021, arXiv:2104.04473, section 3: devices that exchange most are on one node.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import numpy as np

from mpmd.planner.hardware import Hardware
from mpmd.planner.submesh import INNERMOST_FIRST, Submesh
from mpmd.simulate import Link


@dataclasses.dataclass(frozen=True)
class DeviceRange:
    """The devices of a group: from device ``start`` on, as many as ``submesh`` has."""

    start: int
    submesh: Submesh

    @property
    def num_devices(self) -> int:
        return math.prod(self.submesh.values())

    @property
    def stop(self) -> int:
        return self.start + self.num_devices


def device_ranges_of(submeshes: tuple[Submesh, ...]) -> tuple[DeviceRange, ...]:
    """The devices of groups on consecutive devices, from device 0 on."""
    device_ranges, start = [], 0
    for submesh in submeshes:
        device_ranges.append(DeviceRange(start, submesh))
        start = device_ranges[-1].stop
    return tuple(device_ranges)


def axis_links(cluster: Hardware, device_range: DeviceRange) -> tuple[Link, ...]:
    """The slowest link of the rings along each axis, ``INNERMOST_FIRST``.

    Rings that leave a node share its link: as many rings as the node has devices that no ring joins.
    """
    links, stride = [], 1
    for kind in INNERMOST_FIRST:
        block = stride * device_range.submesh.get(kind, 1)
        starts = range(device_range.start, device_range.stop, block)
        if all(_same_node(cluster, first, first + block) for first in starts):
            links.append(cluster.device_link)
        else:
            rings = min(stride, cluster.devices_per_node)
            links.append(Link(cluster.node_link.latency, cluster.node_link.bandwidth / rings))
        stride = block
    return tuple(links)


def all_reduce(
    size: int, nbytes: np.ndarray, link: Link, number: np.ndarray | float = 1.0, floor: float = 0.0
) -> np.ndarray:
    """The seconds of all-reduces of values of ``nbytes`` bytes over ``size`` devices.

    A ring moves ``2 (n - 1) / n`` of the bytes over each link, in ``2 (n - 1)`` messages: Patarasuk and Yuan,
    "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009.

    Args:
      nbytes: of all values together.
      number: of the all-reduces.
      floor: the seconds of each beside those of its messages.
    """
    return 2 * all_gather(size, nbytes, link, number, floor / 2)


def all_gather(
    size: int, nbytes: np.ndarray, link: Link, number: np.ndarray | float = 1.0, floor: float = 0.0
) -> np.ndarray:
    """The seconds of all-gathers of values of ``nbytes`` bytes, of which ``size`` devices have shards.

    A reduce-scatter takes as long: both are one half of the ring of ``all_reduce``, which has the arguments.
    """
    steps = size - 1
    moving = steps / size * nbytes / link.bandwidth
    return np.where(nbytes > 0, moving + number * (steps * link.latency + floor), 0.0)


def message_link(cluster: Hardware, source: DeviceRange, target: DeviceRange) -> Link:
    """The link of a message between two groups, for the bytes that a device of the target receives.

    Within a node each device has a link of its own. Between nodes the devices of a node share one, over which
    each shard of a value comes once, however many devices receive it.
    """
    if source.start == target.start:
        return Link()
    if share_a_node(cluster, source, target):
        return cluster.device_link
    on_a_node = min(target.num_devices, cluster.devices_per_node)
    shards = max(1, on_a_node // target.submesh.get("model", 1))
    return Link(cluster.node_link.latency, cluster.node_link.bandwidth / shards)


def share_a_node(cluster: Hardware, source: DeviceRange, target: DeviceRange) -> bool:
    """Whether all devices of two groups are on one node."""
    return _same_node(cluster, min(source.start, target.start), max(source.stop, target.stop))


def shards_on_a_node(cluster: Hardware, device_range: DeviceRange, divided: Collection[str]) -> int:
    """The number of shards of a value that the devices of one node receive together.

    Where a group begins within a node, it is the number for a group that begins at the start of a node.

    Args:
      divided: the axes along which the value is divided.
    """
    shards, left = 1, min(device_range.num_devices, cluster.devices_per_node)
    for kind in INNERMOST_FIRST:
        size = device_range.submesh.get(kind, 1)
        if kind in divided:
            shards *= min(size, left)
        left = max(1, left // size)
    return shards


def _same_node(cluster: Hardware, start: int, stop: int) -> bool:
    return start // cluster.devices_per_node == (stop - 1) // cluster.devices_per_node
