"""Nodes of known accelerators, with the sources of their numbers.

``python -m benchmarks published`` compares predictions with published steps of five presets, whose rates of
products are fitted to a third of the steps. The remaining presets are "not fitted": rates of datasheets times
efficiencies that were measured on A100 and H100.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from mpmd.planner.curves import Curve
from mpmd.simulate import Link

# Fitted to a third of vTrain's iterations on A100: messages and all-reduces of NCCL, and what a task takes
# beside its kernels.
LATENCY, COLLECTIVE_FLOOR, TASK_OVERHEAD = 8.79e-6, 2.52e-5, 6.81e-4

# Kernels of a graph, from start to start: NVIDIA, "Getting Started with CUDA Graphs", 2019. A framework that
# starts kernels one by one from Python takes ten times as long.
KERNEL_FLOOR = 3.4e-6

# Assumed: the seconds of a message between TPUs.
HOP = 1e-6


def devices(
    kind: str,
    memory: float,
    product: float,
    half: float,
    attention: float,
    memory_bandwidth: float,
    device_link: float,
    node_link: float,
    devices_per_node: int = 8,
    latency: float = LATENCY,
    collective_floor: float = COLLECTIVE_FLOOR,
    kernel_floor: float = KERNEL_FLOOR,
    task_overhead: float = TASK_OVERHEAD,
    dtypes: Mapping[str, float] = types.MappingProxyType({}),
    is_accelerator: bool = True,
) -> dict[str, Any]:
    """The attributes of a cluster of a kind of device.

    Args:
      kind: as Ray names the accelerator type.
      memory: bytes of a device.
      product: operations per second of large products in bfloat16.
      half: the operations of a product that has half of that rate.
      attention: operations per second of batched products in bfloat16, which kernels of attention are.
      memory_bandwidth, device_link, node_link: bytes per second.
      devices_per_node: the devices of a node; of a TPU the chips of a slice, see ``tpu``.
      latency, collective_floor, kernel_floor, task_overhead: seconds.
      dtypes: the rates of products in further dtypes, over the rates in bfloat16.
      is_accelerator: whether XLA merges all-reduces, overlaps gathers and has products add to accumulators.
        Otherwise ``product`` is in float32, and products of all kinds have this rate.
    """
    rates = {}
    for dtype, factor in {"bfloat16": 1.0, **dtypes}.items():
        rates[f"product {dtype}"] = Curve(factor * product, factor * half)
        rates[f"batched_product {dtype}"] = Curve(factor * attention)
    return {
        "kind": kind,
        "devices_per_node": devices_per_node,
        "memory": memory,
        "flops": product,
        "memory_bandwidth": memory_bandwidth,
        "device_link": Link(latency, device_link),
        "node_link": Link(LATENCY, node_link),
        "task_overhead": task_overhead,
        "rates": rates if is_accelerator else {},
        "kernel_floor": kernel_floor,
        "collective_floor": collective_floor,
        "merges_all_reduces": is_accelerator,
        "overlaps_gathers": is_accelerator,
        "accumulates_products": is_accelerator,
    }


# The share of the datasheet that devices reach. Products: fitted to an A100; the best kernels of an H100
# reach 75% (Shah et al., "FlashAttention-3", 2024, arXiv:2407.08608, abstract). Memory: a copy on the device.
# Links: all-reduces by nccl-tests, 235 of 300e9 bytes per second on an A100 and 370 of 450e9 on an H100; on
# nodes of H100 324 and 331 of 400e9 are published, and the fit to vTrain's nodes of 100e9 is 77e9.
PRODUCT, MEMORY, NVLINK, NODE_LINK = 0.75, 0.85, 0.78, 0.77

# Attention: the middle of 50% to 73% (Dao, "FlashAttention-2", 2023, arXiv:2307.08691), and on devices after
# the A100 35% (FlashAttention-3), both in the abstract.
ATTENTION, ATTENTION_OF_HOPPER = 0.6, 0.35

# Rates of datasheets over the rate in bfloat16: of products in float32, which JAX computes in TF32 unless
# told otherwise, and of products in FP8 on devices after the A100.
TF32 = {"float32": 0.5}
TF32_AND_FP8 = {**TF32, "float8_e4m3fn": 2.0, "float8_e5m2": 2.0}

# Bytes per second of PCIe 4.0 with 16 lanes, and of eight links of 200 or 400 Gbit/s of a node.
PCIE, HDR, NDR = 32e9, 200e9, 400e9


def gpu(
    kind: str,
    memory: float,
    peak: float,
    memory_bandwidth: float,
    device_link: float,
    node_link: float,
    attention: float = ATTENTION_OF_HOPPER,
    dtypes: Mapping[str, float] = TF32_AND_FP8,
) -> dict[str, Any]:
    """A GPU of which no published step was fitted: datasheet rates times the shares above.

    Args:
      peak: operations per second of dense products in bfloat16, with sums in float32.
      memory_bandwidth, device_link, node_link: of the datasheet, links in one direction.
      attention: the share of the peak that kernels of attention reach.
      dtypes: as of ``devices``.
    """
    return devices(
        kind=kind,
        memory=memory,
        product=PRODUCT * peak,
        half=7.4e-5 * peak,
        attention=attention * peak,
        memory_bandwidth=MEMORY * memory_bandwidth,
        device_link=NVLINK * device_link,
        node_link=NODE_LINK * node_link,
        dtypes=dtypes,
    )


def tpu(
    kind: str,
    memory: float,
    product: float,
    memory_bandwidth: float,
    device_link: float,
    node_link: float,
    slice_chips: int,
) -> dict[str, Any]:
    """A kind of TPU, of which a node is a slice: the chips that ICI joins, here ``slice_chips`` chips.

    Slices have other sizes, too: give ``devices_per_node``. The links of ICI are a torus, but a cluster has
    rings. So ``device_link`` is the sum of all links of a chip in one direction: a collective over a whole
    slice uses all links, and a collective over some of the chips, such as tensor parallelism over four,
    uses fewer and takes longer than ``device_link`` says. Between nodes is the network of the data centre.
    Products have one rate, also in attention, and a program starts no kernels.
    """
    return devices(
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
    # Products: fitted to a third of the iterations of vTrain (Bang et al., MICRO 2024, arXiv:2312.12391) on
    # several nodes, which have four links of 200 Gbit/s. Capacity and memory: NVIDIA's datasheet of 2021.
    "a100-80gb": devices(
        kind="A100",
        memory=80e9,
        product=2.34e14,
        half=2.31e10,
        attention=ATTENTION * 312e12,
        memory_bandwidth=MEMORY * 2.039e12,
        device_link=2.35e11,
        node_link=NODE_LINK * 100e9,
        dtypes=TF32,
    ),
    # NVIDIA's datasheet of the A100, 2021: 312e12 in bfloat16, 40e9 bytes of HBM2 at 1.555e12 per second, and
    # 300e9 of NVLink in one direction. Nodes have four links of 100 Gbit/s. Not fitted.
    "a100-40gb": gpu("A100-40G", 40e9, 312e12, 1.555e12, 300e9, 50e9, ATTENTION, TF32),
    # A board of 500 W with HBM2e, 2.4e12 bytes per second. Products: fitted to a third of the steps of
    # torchtitan on it (benchmarks/llama3_h100_202412_torchtitan.md of its repository). Capacity: 80e9 of the
    # datasheet of 2022, although torchtitan's boards have 96e9.
    "h100": devices(
        kind="H100",
        memory=80e9,
        product=4.52e14,
        half=7.32e10,
        attention=ATTENTION_OF_HOPPER * 989e12,
        memory_bandwidth=MEMORY * 2.4e12,
        device_link=3.7e11,
        node_link=NODE_LINK * NDR,
        dtypes=TF32_AND_FP8,
    ),
    # NVIDIA's datasheet of the H100 SXM (700 W), 2023: 989e12, 80e9 bytes of HBM3 at 3.35e12. Not fitted.
    "h100-sxm": gpu("H100", 80e9, 989e12, 3.35e12, 450e9, NDR),
    # NVIDIA's datasheet of the H200, 2024: products and links of the H100, HBM3e at 4.8e12. Not fitted.
    "h200": gpu("H200", 141e9, 989e12, 4.8e12, 450e9, NDR),
    # NVIDIA's datasheet of Blackwell, 2025, a GPU of an HGX B200: 2.25e15, 180e9 bytes of HBM3e at 7.7e12 (a
    # DGX B200 has 64e12 in eight), and 900e9 of NVLink in one direction. Not fitted.
    "b200": gpu("B200", 180e9, 2.25e15, 7.7e12, 900e9, NDR),
    # NVIDIA's datasheet of the L40S, 2023: 362.05e12, 48e9 bytes of GDDR6 at 864e9, and PCIe 4.0. Not fitted.
    "l40s": gpu("L40S", 48e9, 362.05e12, 864e9, PCIE, HDR),
    # NVIDIA's paper "Ada GPU architecture", 2022, of the GeForce RTX 4090: 165.2e12 with sums in float32, and
    # GDDR6X at 1.008e12. These GPUs exchange data through memory of the host, which may halve the share of
    # PCIe. Ethernet of 100 Gbit/s. Not fitted.
    "rtx4090": gpu("GeForce-RTX-4090", 24e9, 165.2e12, 1.008e12, PCIE, 12.5e9),
    # Intel's page of the Xeon Platinum 8480+, 2023: 56 cores of 2.0 GHz with two AVX-512 units each, so 64
    # operations per cycle in float32; eight channels of DDR5-4800. A device is all cores of a node with one
    # socket and, by assumption, 256e9 bytes. Ethernet of 100 Gbit/s. Not fitted: the shares are as of GPUs.
    "cpu": devices(
        kind="CPU",
        memory=256e9,
        product=PRODUCT * 56 * 2.0e9 * 64,
        half=0.0,
        attention=PRODUCT * 56 * 2.0e9 * 64,
        memory_bandwidth=MEMORY * 307.2e9,
        device_link=NODE_LINK * 12.5e9,
        node_link=NODE_LINK * 12.5e9,
        devices_per_node=1,
        is_accelerator=False,
    ),
    # Products: fitted to a third of the steps of MaxText (``benchmarks/published/tpus.py`` has the tables).
    # Capacities: Google's pages docs.cloud.google.com/tpu/docs/v5e, v5p-training and v6e. Memory and links:
    # the shares above of the rates of these pages. A slice is the largest of v5e and v6e, and a cube of v5p.
    "v5e": tpu(
        "TPU-V5LITEPOD", 16e9, 1.66e14, MEMORY * 0.819e12, NVLINK * 200e9, NODE_LINK * 0.8e12, slice_chips=256
    ),
    "v5p": tpu(
        "TPU-V5P", 95e9, 3.63e14, MEMORY * 2.765e12, NVLINK * 600e9, NODE_LINK * 0.4e12, slice_chips=64
    ),
    "v6e": tpu(
        "TPU-V6E", 32e9, 5.57e14, MEMORY * 1.638e12, NVLINK * 400e9, NODE_LINK * 3.2e12, slice_chips=256
    ),
}
