"""Reader of the iteration times that come with vTrain, of which this repository has no copy.

Bang et al., "vTrain: A Simulation Framework for Evaluating Cost-effective and Compute-optimal Large Language
Model Training", MICRO 2024, arXiv:2312.12391; https://github.com/VIA-Research/vTrain, directory ``data``.
"""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Iterator

from benchmarks.published.facts import Fact, Model

ONE_NODE, NODES = "vTrain, one node of A100", "vTrain, 64 to 512 A100"
_FIELDS = (
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
)


def read(checkout: pathlib.Path) -> Iterator[Fact]:
    """The facts of a checkout of vTrain.

    Iterations of one node count as without recomputation: with it, the largest would compute at 84% of the
    peak of an A100, including kernels that are bound by memory. Iterations of several nodes recompute, as
    their configurations say.
    """
    for group, name, recomputed in (
        (ONE_NODE, "ground_truth_single.csv", 0.0),
        (NODES, "ground_truth_multi.csv", 1.0),
    ):
        with (checkout / "data" / name).open(newline="", encoding="utf-8-sig") as lines:
            for row in csv.DictReader(lines):
                numbers = (int(row[field]) for field in _FIELDS)
                devices, batch, microbatch, width, heads, layers, length, tensor, data, pipeline = numbers
                yield Fact(
                    group,
                    "a100",
                    Model(layers, width, heads, length),
                    devices,
                    batch,
                    microbatch,
                    tensor,
                    data,
                    pipeline,
                    float(row["iteration time (ms)"]) / 1e3,
                    recomputed=recomputed,
                )
