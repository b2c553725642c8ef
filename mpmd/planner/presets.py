"""Nodes of known accelerators, with the sources of their numbers.

A device is here only if others have published measured steps of it, against which
``python -m benchmarks published`` compares predictions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpmd.planner.curves import Curve
from mpmd.simulate import Link


@dataclasses.dataclass(frozen=True)
class Preset:
    """A kind of device, eight of them on a node.

    Attributes:
      kind: as Ray names the accelerator type.
      memory: bytes of a device.
      product: operations per second of large products in bfloat16.
      half: the operations of a product that has half of that rate.
      attention: operations per second of batched products in bfloat16, which kernels of attention are.
      memory_bandwidth, device_link, node_link: bytes per second.
    """

    kind: str
    memory: float
    product: float
    half: float
    attention: float
    memory_bandwidth: float
    device_link: float
    node_link: float

    def fields(self) -> dict[str, Any]:
        """The attributes of a cluster."""
        return {
            "kind": self.kind,
            "devices_per_node": 8,
            "memory": self.memory,
            "flops": self.product,
            "memory_bandwidth": self.memory_bandwidth,
            "device_link": Link(LATENCY, self.device_link),
            "node_link": Link(LATENCY, self.node_link),
            "task_overhead": TASK_OVERHEAD,
            "rates": {
                "product bfloat16": Curve(self.product, self.half),
                "batched_product bfloat16": Curve(self.attention),
            },
            "kernel_floor": KERNEL_FLOOR,
            "collective_floor": COLLECTIVE_FLOOR,
            "merges_all_reduces": True,
            "overlaps_gathers": True,
        }


# Fitted to a third of others' iterations, by ``python -m benchmarks.published.fit``: messages and all-reduces
# of NCCL, and what a task takes beside its kernels.
LATENCY, COLLECTIVE_FLOOR, TASK_OVERHEAD = 6.98e-6, 3.05e-5, 9.26e-4

# Kernels of a graph, from start to start: NVIDIA, "Getting Started with CUDA Graphs", 2019. A framework that
# starts kernels one by one from Python takes ten times as long.
KERNEL_FLOOR = 3.4e-6

PRESETS = {
    # Iterations of Megatron-LM on A100, of vTrain (Bang et al., MICRO 2024, arXiv:2312.12391): products,
    # memory and links. Attention: the middle of 50% to 73% of 312e12 (Dao, "FlashAttention-2", 2023,
    # arXiv:2307.08691, abstract). Memory: NVIDIA's datasheet of 2021.
    "a100-80gb": Preset(
        kind="A100",
        memory=80e9,
        product=2.58e14,
        half=2.77e10,
        attention=1.872e14,
        memory_bandwidth=1.45e12,
        device_link=3.0e11,
        node_link=9.79e10,
    ),
    # Products: steps of torchtitan on H100 with HBM2e, at 500 W (benchmarks/llama3_h100_202412_torchtitan.md
    # of its repository). Attention: 35% of 989e12 (Shah et al., "FlashAttention-3", 2024, arXiv:2407.08608).
    # Capacity of the datasheet of 2022. The others are the shares of an A100 of the datasheet's rates.
    "h100": Preset(
        kind="H100",
        memory=80e9,
        product=5.83e14,
        half=8.78e10,
        attention=3.46e14,
        memory_bandwidth=2.38e12,
        device_link=4.5e11,
        node_link=1.96e11,
    ),
}
