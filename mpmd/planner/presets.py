"""Nodes of known accelerators, with the sources of their numbers.

A device is here only if others have published measured steps of it, against which
``python -m benchmarks published`` compares predictions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpmd.planner.curves import Curve
from mpmd.simulate import Link

# Fitted to a third of others' iterations, by ``python -m benchmarks.published.fit``: messages and all-reduces
# of NCCL, and what a task takes beside its kernels.
LATENCY, COLLECTIVE_FLOOR, TASK_OVERHEAD = 8.79e-6, 2.52e-5, 6.81e-4

# Kernels of a graph, from start to start: NVIDIA, "Getting Started with CUDA Graphs", 2019. A framework that
# starts kernels one by one from Python takes ten times as long.
KERNEL_FLOOR = 3.4e-6

# Assumed: the seconds of a message between TPUs.
HOP = 1e-6


@dataclasses.dataclass(frozen=True)
class Preset:
    """A kind of device.

    Attributes:
      kind: as Ray names the accelerator type.
      memory: bytes of a device.
      product: operations per second of large products in bfloat16.
      half: the operations of a product that has half of that rate.
      attention: operations per second of batched products in bfloat16, which kernels of attention are.
      memory_bandwidth, device_link, node_link: bytes per second.
      devices_per_node: the devices of a node; of a TPU the chips of a slice, see ``tpu``.
      latency, collective_floor, kernel_floor, task_overhead: seconds.
    """

    kind: str
    memory: float
    product: float
    half: float
    attention: float
    memory_bandwidth: float
    device_link: float
    node_link: float
    devices_per_node: int = 8
    latency: float = LATENCY
    collective_floor: float = COLLECTIVE_FLOOR
    kernel_floor: float = KERNEL_FLOOR
    task_overhead: float = TASK_OVERHEAD

    def fields(self) -> dict[str, Any]:
        """The attributes of a cluster."""
        return {
            "kind": self.kind,
            "devices_per_node": self.devices_per_node,
            "memory": self.memory,
            "flops": self.product,
            "memory_bandwidth": self.memory_bandwidth,
            "device_link": Link(self.latency, self.device_link),
            "node_link": Link(LATENCY, self.node_link),
            "task_overhead": self.task_overhead,
            "rates": {
                "product bfloat16": Curve(self.product, self.half),
                "batched_product bfloat16": Curve(self.attention),
            },
            "kernel_floor": self.kernel_floor,
            "collective_floor": self.collective_floor,
            "merges_all_reduces": True,
            "overlaps_gathers": True,
        }


def tpu(
    kind: str,
    memory: float,
    product: float,
    memory_bandwidth: float,
    device_link: float,
    node_link: float,
    slice_chips: int,
) -> Preset:
    """A kind of TPU, of which a node is a slice: the chips that ICI joins, here ``slice_chips`` of them.

    Slices have other sizes, too: give ``devices_per_node``. The links of ICI are a torus, but a cluster has
    rings. So ``device_link`` is what all links of a chip carry in one direction: a collective over a whole
    slice uses them all, and one over some of its chips, such as tensor parallelism over four, uses fewer and
    takes longer than it says. Between nodes is the network of the data centre. Products have one rate, also
    those of attention, and a program starts no kernels.
    """
    return Preset(
        kind=kind,
        memory=memory,
        product=product,
        half=0.0,
        attention=product,
        memory_bandwidth=memory_bandwidth,
        device_link=device_link,
        node_link=node_link,
        devices_per_node=slice_chips,
        latency=HOP,
        collective_floor=0.0,
        kernel_floor=0.0,
        task_overhead=0.0,
    )


PRESETS = {
    # Iterations of Megatron-LM on A100, of vTrain (Bang et al., MICRO 2024, arXiv:2312.12391): products,
    # memory and links. Attention: the middle of 50% to 73% of 312e12 (Dao, "FlashAttention-2", 2023,
    # arXiv:2307.08691, abstract). Memory: NVIDIA's datasheet of 2021.
    "a100-80gb": Preset(
        kind="A100",
        memory=80e9,
        product=2.32e14,
        half=2.31e10,
        attention=1.872e14,
        memory_bandwidth=1.19e12,
        device_link=2.97e11,
        node_link=7.7e10,
    ),
    # Products: steps of torchtitan on H100 with HBM2e, at 500 W (benchmarks/llama3_h100_202412_torchtitan.md
    # of its repository). Attention: 35% of 989e12 (Shah et al., "FlashAttention-3", 2024, arXiv:2407.08608).
    # Capacity of the datasheet of 2022. The others are the shares of an A100 of the datasheet's rates.
    "h100": Preset(
        kind="H100",
        memory=80e9,
        product=5.61e14,
        half=7.32e10,
        attention=3.46e14,
        memory_bandwidth=1.96e12,
        device_link=4.46e11,
        node_link=1.54e11,
    ),
    # Products: steps of MaxText (``benchmarks/published/tpus.py`` has the tables). Capacities: Google's pages
    # docs.cloud.google.com/tpu/docs/v5e, v5p-training and v6e. The others are the shares of an A100 of the
    # rates of these pages. A slice is the largest of v5e and v6e, and one cube of v5p.
    "v5e": tpu("TPU-V5LITEPOD", 16e9, 1.79e14, 4.78e11, 1.98e11, 3.08e11, slice_chips=256),
    "v5p": tpu("TPU-V5P", 95e9, 3.68e14, 1.61e12, 5.94e11, 1.54e11, slice_chips=64),
    "v6e": tpu("TPU-V6E", 32e9, 6.09e14, 9.56e11, 3.96e11, 1.23e12, slice_chips=256),
}
