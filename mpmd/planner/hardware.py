"""What a plan knows of a cluster: devices, their speed and memory, and the links between them."""

from __future__ import annotations

import dataclasses

from mpmd.simulate import Link


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal devices on equal nodes.

    Attributes:
      nodes, devices_per_node: how many there are.
      memory: bytes that a device has for a step.
      flops: operations per second of a device, in matrix products of the step's dtype.
      memory_bandwidth: bytes per second that a device reads or writes of its memory.
      device_link: between devices of a node, each with its own; seconds and bytes per second.
      node_link: between nodes, shared by the devices of a node; seconds and bytes per second.
      task_overhead: seconds that a task takes beside what it computes.
    """

    nodes: int
    devices_per_node: int
    memory: float
    flops: float
    memory_bandwidth: float
    device_link: Link
    node_link: Link
    task_overhead: float = 0.0
