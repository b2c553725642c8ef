"""The clusters of published steps, and the rule by which their curves are fitted.

The numbers of nodes of A100 are fitted to a third of vTrain's iterations, and the rates of products under
torchtitan and MaxText, on each kind of device, to a third of its table (``fitted_third``). No other fact is
looked at. The other numbers of an H100 are those of an A100, in proportion to the datasheets, and so are the
memory and the links of TPUs, whose programs have no floors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from benchmarks.published.facts import Fact
from benchmarks.published.gpus import TORCHTITAN
from benchmarks.published.tpus import MAXTEXT, TPUS
from benchmarks.published.vtrain import NODES, ONE_NODE
from mpmd.planner.cluster import Cluster
from mpmd.planner.curves import Curve
from mpmd.planner.hardware import Hardware
from mpmd.planner.presets import tpu
from mpmd.simulate import Link


@dataclasses.dataclass(frozen=True)
class Datasheet:
    """The rates that a vendor states, for products in bfloat16.

    Attributes:
      peak: operations per second.
      memory, nvlink, node_link: bytes per second, of all links of a device and of a node in one direction; of
        TPUs ICI, and the data centre's network of ``node`` chips.
      capacity: bytes.
      attention: the share of the peak that kernels of attention have; 0 for the rate of products.
      node: the devices of a node.
    """

    peak: float
    memory: float
    nvlink: float
    node_link: float
    capacity: float
    attention: float = 0.0
    node: int = 8


# NVIDIA's datasheets of 2021 and 2022, with eight links of 200 and 400 Gbit/s, and the H100's memory as
# torchtitan says. Kernels of attention: the middle of 50% to 73% (Dao, "FlashAttention-2", 2023,
# arXiv:2307.08691), and 35% (Shah et al., "FlashAttention-3", 2024, arXiv:2407.08608), both in the abstract.
A100 = Datasheet(312e12, 2.039e12, 300e9, 200e9, 80e9, 0.6)
H100 = Datasheet(989e12, 2.4e12, 450e9, 400e9, 96e9, 0.35)
# docs.cloud.google.com/tpu/docs/v5e, v5p-training and v6e, as of 2026: half of the bandwidth of ICI in both
# directions. A node is the largest slice of v5e and v6e, and a cube of v5p, at 50 Gbit/s for each chip.
V5E = Datasheet(197e12, 0.819e12, 200e9, 0.8e12, 16e9, node=256)
V5P = Datasheet(459e12, 2.765e12, 600e9, 0.4e12, 95e9, node=64)
V6E = Datasheet(918e12, 1.638e12, 400e9, 3.2e12, 32e9, node=256)
DEVICES = {"a100": A100, "h100": H100, "v5e": V5E, "v5p": V5P, "v6e": V6E}
_SHARES = {"a100": 0.8, "h100": 0.71} | dict.fromkeys(TPUS, 0.8)

THIRD = 3


def fitted_third(facts: Iterable[Fact]) -> frozenset[Fact]:
    """The facts to which curves may be fitted.

    Of vTrain's on one node, every third way to divide a width into microbatches (tensor, data, pipeline,
    width, rows), in sorted order, with all of its layers and batches: iterations that differ in these alone
    are linear in them, to five digits. Of those on several nodes, of torchtitan's, and of MaxText's on each
    kind of TPU, every third line.
    """
    facts = list(facts)
    ways = sorted({way_of(fact) for fact in facts if fact.group == ONE_NODE})
    some = {*ways[::THIRD]}
    chosen = {fact for fact in facts if fact.group == ONE_NODE and way_of(fact) in some}
    for group in (NODES, TORCHTITAN, *MAXTEXT.values()):
        chosen.update([fact for fact in facts if fact.group == group][::THIRD])
    return frozenset(chosen)


def way_of(fact: Fact) -> tuple[int, ...]:
    """The way to divide the blocks of a width into microbatches."""
    return fact.tensor, fact.data, fact.pipeline, fact.model.width, fact.microbatch


def datasheets(_: str) -> dict[str, Hardware]:
    """Nodes of devices with 80% of their peak, of an H100 71%, and no floors."""
    return {
        kind: Cluster(
            1,
            sheet.node,
            sheet.capacity,
            _SHARES[kind] * sheet.peak,
            0.9 * sheet.memory,
            Link(3e-6, 0.8 * sheet.nvlink),
            Link(1e-5, sheet.node_link),
        )
        for kind, sheet in DEVICES.items()
    }


@dataclasses.dataclass(frozen=True)
class Curves:
    """The fitted numbers.

    Attributes:
      product, half: operations per second of products, and the operations of one that has half of the rate.
      memory, link, node_link: bytes per second.
      kernel, collective, task: seconds, the floors of each.
      latency, node_latency: seconds of a message.
      a100, h100: the rates of products under torchtitan.
      v5e, v5p, v6e: the rates of products under MaxText.
    """

    product: float
    half: float
    memory: float
    kernel: float
    collective: float
    link: float
    latency: float
    node_link: float
    node_latency: float
    task: float
    a100: float
    h100: float
    v5e: float
    v5p: float
    v6e: float

    def clusters(self, group: str) -> dict[str, Hardware]:
        """The cluster of each kind of device for a group of facts, of one node."""
        if group == TORCHTITAN:
            return {"a100": self._cluster(A100, self.a100), "h100": self._cluster(H100, self.h100)}
        if group in MAXTEXT.values():
            return {name: self._slice(DEVICES[name], getattr(self, name)) for name in TPUS}
        return {"a100": self._cluster(A100, self.product)}

    def _slice(self, sheet: Datasheet, product: float) -> Hardware:
        """A slice of TPUs, with all but the rate of products in proportion to an A100."""
        preset = tpu(
            kind="TPU",
            memory=sheet.capacity,
            product=product,
            memory_bandwidth=self.memory * sheet.memory / A100.memory,
            device_link=self.link * sheet.nvlink / A100.nvlink,
            node_link=self.node_link * sheet.node_link / A100.node_link,
            slice_chips=sheet.node,
        )
        return Cluster(nodes=1, **preset.fields())

    def _cluster(self, sheet: Datasheet, product: float) -> Hardware:
        """A node of devices with this rate of products; datasheets scale the other rates of an A100."""
        faster = sheet.peak / A100.peak
        return Cluster(
            nodes=1,
            devices_per_node=sheet.node,
            memory=sheet.capacity,
            flops=product,
            memory_bandwidth=self.memory * sheet.memory / A100.memory,
            device_link=Link(self.latency, self.link * sheet.nvlink / A100.nvlink),
            node_link=Link(self.node_latency, self.node_link * sheet.node_link / A100.node_link),
            task_overhead=self.task,
            rates={
                "product bfloat16": Curve(product, self.half * faster),
                "batched_product bfloat16": Curve(sheet.attention * sheet.peak),
            },
            kernel_floor=self.kernel,
            collective_floor=self.collective,
            merges_all_reduces=True,
            overlaps_gathers=True,
        )


FITTED = Curves(
    product=2.32e14,
    half=2.31e10,
    memory=1.19e12,
    kernel=4.92e-05,
    collective=2.52e-05,
    link=2.97e11,
    latency=8.79e-06,
    node_link=7.7e10,
    node_latency=2.51e-06,
    task=0.000681,
    a100=2e14,
    h100=5.61e14,
    v5e=1.79e14,
    v5p=3.68e14,
    v6e=6.09e14,
)
"""Of ``python -m benchmarks.published.fit --vtrain PATH``."""
