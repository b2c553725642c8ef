"""What a plan knows of a step: a table of its layers, made by tracing it once with each layer as a stage.

All bytes and operations are those of the whole layer, on however many devices, for one microbatch of
``Profile.microbatch_rows`` rows, unless it says otherwise. What depends on the rows is proportional to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Kind = Literal["data", "model", "sequence"]
"""The ways to divide the work of a layer over devices: by the rows of the batch; by dimensions of its
weights, as Megatron does; by another dimension of values between layers."""


@dataclasses.dataclass(frozen=True)
class TaskWork:
    """What a task computes.

    Attributes:
      operations: multiplications and additions.
      nbytes: what it reads and writes of memory, of values that depend on the rows, if each fusion of XLA
        reads its operands once and writes its results once.
      nbytes_beside: those of them that are read and written by other than products, while none computes.
      temporaries: the most bytes at once of what it makes and nobody else reads.
    """

    operations: float
    nbytes: float
    nbytes_beside: float = 0.0
    temporaries: float = 0.0


@dataclasses.dataclass(frozen=True)
class Division:
    """What it means for a layer that the devices along an axis of the submesh share a dimension.

    Attributes:
      largest: the number of devices has to divide this: the greatest common divisor of the sizes of what is
        divided.
      operations, weights, activations: the shares of the layer's operations, of its weights' bytes, and of
        the bytes of its residuals and of what it gets from other layers that are divided, from 0 to 1; the
        rest is on every device.
      reduced_forward, reduced_backward: bytes of the values that are summed over the axis in each microbatch.
        What is gathered, or summed and scattered, counts half.
      reduced_per_step: bytes of gradients that are summed over the axis once per step.
      received: the share of the bytes of what it gets from other layers alone.
    """

    largest: int
    operations: float
    weights: float
    activations: float
    reduced_forward: float = 0.0
    reduced_backward: float = 0.0
    reduced_per_step: float = 0.0
    received: float = 0.0


@dataclasses.dataclass(frozen=True)
class Layer:
    """A part of the loop's body that is in one stage as a whole.

    Attributes:
      name: for tables, such as ``layers 3``.
      forward, backward: its tasks; the backward without what rematerialisation computes again.
      weights: bytes of the arguments and constants that it reads, but for the batch.
      state: bytes of what the step updates with its gradients and no layer reads, such as moments. Of
        several loops, also an equal share of what the others' layers have, and the layers of this loop not.
      gradients: bytes of their accumulators.
      residuals: bytes that its forward keeps for its backward.
      entering: bytes that its forward gets from the layers before it; its backward sends as many back.
      divisions: the ways to divide it; none of a kind by which nothing of it is divided.
    """

    name: str
    forward: TaskWork
    backward: TaskWork
    weights: int
    state: int
    gradients: int
    residuals: int
    entering: int
    divisions: Mapping[Kind, Division]


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a search knows of a loop of a step, or of a step that has none: that is one layer.

    Attributes:
      layers: in the order in which a microbatch passes through them.
      rows: of the whole batch.
      microbatch_rows: of the microbatch that the layers' numbers are for.
      num_microbatches: the number that the step itself has fixed; ``None`` if it is open.
      are_stages: whether the user marked the stages, so that each layer is a stage.
      skips: bytes of values that go past layers: from which layer to which, without those that ``entering``
        of the next layer has.
      tied: layers that share weights, with the bytes; each of the layers counts them among its own.
      outside: what the step does outside the loop, for all weights: the optimizer. Of several loops, what
        is done after this one and before the next; of the first, what is done before it, too.
      batch: bytes of a whole batch.
      has_backward: whether there are backward tasks.
      specs: for each kind, the dimension of an argument's leaf that is divided, by the leaf's position: of
        weights, what is combined with them element by element, and the batch. All loops have the same.
      decision_index: which of the step's decisions the loop is traced under (``Decisions.of_loops``);
        ``None`` for a step without a loop.
    """

    layers: tuple[Layer, ...]
    rows: int
    microbatch_rows: int
    num_microbatches: int | None
    are_stages: bool
    skips: tuple[tuple[int, int, int], ...]
    tied: tuple[tuple[tuple[int, ...], int], ...]
    outside: TaskWork
    batch: int
    has_backward: bool
    specs: Mapping[Kind, Mapping[int, int]]
    decision_index: int | None = 0
