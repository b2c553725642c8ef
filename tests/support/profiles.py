"""Synthetic profiles of steps, whose numbers are computed from the sizes of models."""

from __future__ import annotations

import dataclasses

from mpmd.language.remat import Remat
from mpmd.planner.all_reduces import AllReduces
from mpmd.planner.cluster import Cluster
from mpmd.planner.layer_profile import Division, Kind, Layer, LayerProfile, Recomputation, TaskWork
from mpmd.simulate import Link


def gpt(
    num_layers: int = 96,
    width: int = 12288,
    heads: int = 96,
    length: int = 2048,
    vocabulary: int = 51200,
    rows: int = 1536,
) -> LayerProfile:
    """A transformer as GPT-3's, in bfloat16, with adam's moments and a copy of the weights in float32.

    Operations and the bytes of activations are those of Narayanan et al., 2021, arXiv:2104.04473, appendix,
    and of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
    arXiv:2205.05198, section 4, for a microbatch of one row.
    """
    stream = 2 * length * width
    blocks = [_block(index, width, heads, length) for index in range(num_layers)]
    divisions: dict[Kind, Division] = {
        "data": Division(rows, 1.0, 0.0, 1.0, received=1.0, reduced_per_step=4.0 * vocabulary * width),
        "model": Division(vocabulary, 1.0, 1.0, 0.0, forward=AllReduces(stream)),
    }
    weights = vocabulary * width
    embedding = Layer(
        "embedding",
        TaskWork(0.0, 2.0 * stream),
        TaskWork(0.0, 2.0 * stream),
        weights=2 * weights,
        state=12 * weights,
        gradients=4 * weights,
        residuals=4 * length,
        entering=0,
        divisions=divisions,
    )
    products = 2.0 * length * width * vocabulary
    head = dataclasses.replace(
        embedding,
        name="head",
        forward=TaskWork(products, 4.0 * length * vocabulary),
        backward=TaskWork(2 * products, 8.0 * length * vocabulary),
        residuals=4 * length * vocabulary + stream,
        entering=stream,
        divisions={
            **divisions,
            "model": Division(vocabulary, 1.0, 1.0, 0.9, backward=AllReduces(stream)),
        },
    )
    return profile((embedding, *blocks, head), rows)


def _block(index: int, width: int, heads: int, length: int) -> Layer:
    weights = 12 * width * width
    stream = 2 * length * width
    products = 2.0 * length * weights + 4.0 * length * length * width
    residuals = stream // 2 * 34 + 5 * heads * length * length
    return Layer(
        f"layers {index}",
        TaskWork(products, 12.0 * stream + 4.0 * heads * length * length),
        TaskWork(2 * products, 24.0 * stream + 8.0 * heads * length * length),
        weights=2 * weights,
        state=12 * weights,
        gradients=4 * weights,
        residuals=residuals,
        entering=stream,
        divisions={
            "data": Division(1, 1.0, 0.0, 1.0, received=1.0, reduced_per_step=4.0 * weights),
            "model": Division(
                heads,
                1.0,
                1.0,
                1 - 5 * stream / residuals,
                forward=AllReduces(2.0 * stream),
                backward=AllReduces(2.0 * stream),
            ),
        },
    )


def layer(
    name: str,
    operations: float,
    backward: float | None = None,
    weights: int = 0,
    entering: int = 0,
    residuals: int = 0,
    divisions: dict[Kind, Division] | None = None,
) -> Layer:
    """A layer whose backward has twice the operations of its forward, and whose rows can be divided."""
    data = Division(1, 1.0, 0.0, 1.0, received=1.0, reduced_per_step=float(weights))
    return Layer(
        name,
        TaskWork(operations, 0.0),
        TaskWork(2 * operations if backward is None else backward, 0.0),
        weights=weights,
        state=2 * weights,
        gradients=weights,
        residuals=residuals,
        entering=entering,
        divisions={"data": data} if divisions is None else divisions,
    )


def profile(layers: tuple[Layer, ...], rows: int, **others) -> LayerProfile:
    """A profile for microbatches of one row; what is not given is nothing. Layers may keep what enters."""
    layers = tuple(map(_with_full_remat, layers))
    defaults = {
        "rows": rows,
        "microbatch_rows": 1,
        "num_microbatches": None,
        "are_stages": False,
        "skips": (),
        "tied": (),
        "outside": TaskWork(0.0, 2.0 * sum(layer.state for layer in layers)),
        "batch": 0,
        "has_backward": True,
        "specs": {},
    }
    return LayerProfile(layers=layers, **(defaults | others))


def _with_full_remat(layer: Layer) -> Layer:
    again = Recomputation(min(layer.entering, layer.residuals), layer.forward, reduced=1.0)
    return dataclasses.replace(layer, recomputations={Remat.NOTHING_SAVEABLE: again})


def a100s(nodes: int = 64) -> Cluster:
    """Nodes of 8 A100 with 80 GB: NVLink within a node, eight links of 200 Gbit/s between nodes."""
    return Cluster(
        nodes=nodes,
        devices_per_node=8,
        memory=80e9,
        flops=312e12 * 0.6,
        memory_bandwidth=2.0e12,
        device_link=Link(3e-6, 250e9),
        node_link=Link(10e-6, 8 * 25e9),
        task_overhead=20e-6,
    )
