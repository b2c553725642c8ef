"""Published step times: the model, the way to run it, and the measured seconds."""

from __future__ import annotations

import dataclasses
from typing import Literal

Attention = Literal["scores", "flash"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder of equal layers, in half precision.

    Attributes:
      layers, width, heads, length, vocabulary: its sizes.
      key_heads: heads of keys and values; as many as ``heads`` where it is 0.
      hidden: hidden units of the MLP; ``4 * width`` where it is 0.
      head: hidden units of a head; ``width // heads`` where it is 0.
      experts, best: the experts of a layer, each an MLP of ``hidden`` units, and how many take each token; 0
        where there is one MLP.
      gated: whether the MLP has a gate, as Llama's.
      attention: whether scores are written to memory, or stay within a kernel.
      float32_weights: whether weights are kept in float32 and cast where they are read.
    """

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int = 51200
    key_heads: int = 0
    hidden: int = 0
    gated: bool = False
    attention: Attention = "scores"
    float32_weights: bool = False
    head: int = 0
    experts: int = 0
    best: int = 0

    @property
    def head_size(self) -> int:
        """Hidden units of a head."""
        return self.head or self.width // self.heads

    @property
    def megatron(self) -> bool:
        """Whether it is a model of Megatron-LM before flash attention.

        Then the head has the weights of the embedding (Shoeybi et al., 2019, arXiv:1909.08053).
        """
        return self.attention == "scores"


@dataclasses.dataclass(frozen=True)
class Fact:
    """A measured step.

    Attributes:
      group: the table that it belongs to.
      device: the kind of device, such as ``a100`` or ``v5e``.
      devices: how many there were, eight on a node unless there are ``slices``.
      batch, microbatch: rows of a step, and of a microbatch of one replica; a ``microbatch`` of 0 is not
        published, and the best one is assumed.
      tensor, data, pipeline: the degrees of the three divisions.
      chunks: the stages of each group.
      recomputed: the share of the layers whose backward computes the forward again.
      fsdp: whether weights are divided over ``data``.
      seconds: the time of a step.
      slices: the number of slices of TPUs, each of which counts as a node; 0 for GPUs.
    """

    group: str
    device: str
    model: Model
    devices: int
    batch: int
    microbatch: int
    tensor: int
    data: int
    pipeline: int
    seconds: float
    chunks: int = 1
    recomputed: float = 1.0
    fsdp: bool = False
    slices: int = 0

    @property
    def problem(self) -> tuple[object, ...]:
        """The model, the batch and the devices, for which there are several ways."""
        return self.group, self.device, self.model, self.devices, self.batch
