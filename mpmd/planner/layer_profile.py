"""The profile of a step: a table of its layers, made by tracing it once with each layer as a stage.

All bytes and operations count the whole layer, on however many devices, for one microbatch of
``LayerProfile.microbatch_rows`` rows, unless an attribute says otherwise. Numbers that depend on the rows
are proportional to the number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

from mpmd.language.remat import Remat
from mpmd.planner.all_reduces import NO_ALL_REDUCES, AllReduces
from mpmd.planner.curves import ProductWork

Kind = Literal["data", "model", "sequence"]
"""The ways to divide the work of a layer over devices: by the rows of the batch; by dimensions of its
weights, as Megatron does; by another dimension of values between layers."""


Numbers = Any
"""A number of a layer, or an array with the numbers of all layers (``search/layer_arrays.py``)."""


@dataclasses.dataclass(frozen=True)
class TaskWork:
    """The work of a task.

    Attributes:
      operations: multiplications and additions.
      nbytes: bytes read from memory and written to it, of values that depend on the rows, if each fusion of
        XLA reads its operands once and writes its results once.
      nbytes_beside: the bytes among them that equations other than products read and write.
      temporaries: the most bytes at once of values that only the task itself reads.
      kernels: the number of its kernels, if each fusion of XLA is one.
      products: its products, by the names of ``Hardware.rates``.
    """

    operations: Numbers
    nbytes: Numbers
    nbytes_beside: Numbers = 0.0
    temporaries: Numbers = 0.0
    kernels: Numbers = 0.0
    products: Mapping[str, ProductWork] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """The bytes that a layer keeps, and the work that it does again, under a policy of rematerialisation.

    Attributes:
      residuals: bytes that its forward keeps for its backward, with what enters it.
      work: the part of the forward that its backward computes again.
      reduced: the share of the bytes that the forward all-reduces, which its backward does again.
    """

    residuals: Numbers
    work: TaskWork
    reduced: Numbers


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of a layer over the devices along an axis of the submesh.

    Attributes:
      largest: the greatest common divisor of the sizes of the divided dimensions, which the number of devices
        has to divide.
      operations, weights, activations: the divided shares, from 0 to 1, of the layer's operations, of the
        bytes of its weights, and of the bytes of its residuals and of values from other layers. The rest is
        on every device.
      received: the divided share of the bytes of values from other layers alone.
      forward, backward: the all-reduces over the axis in each microbatch.
      summed_gradients: bytes of gradients in ``backward``, as many for any number of rows; FSDP scatters them
        instead.
      reduced_per_step: bytes of gradients that are all-reduced over the axis once per step.
    """

    largest: int
    operations: Numbers
    weights: Numbers
    activations: Numbers
    received: Numbers = 0.0
    forward: AllReduces = NO_ALL_REDUCES
    backward: AllReduces = NO_ALL_REDUCES
    summed_gradients: Numbers = 0.0
    reduced_per_step: Numbers = 0.0


@dataclasses.dataclass(frozen=True)
class Layer:
    """A part of the loop's body that no stage divides.

    Attributes:
      name: for tables: the weights that it reads and the line at which its forward ends, such as
        ``params['blocks'][3] to model.py:41 (block)``. Layers that differ in their names alone are equal.
      forward, backward: its tasks; the backward without the forward that rematerialisation repeats.
      weights: bytes of the arguments and constants that it reads, except for the batch.
      state: bytes of arguments that the step updates with the layer's gradients and no layer reads, such as
        moments. In a step with several loops, also an equal share of the weights and state of other loops'
        layers that this loop does not have.
      gradients: bytes of the accumulators of its gradients.
      residuals: bytes that its forward keeps for its backward.
      entering: bytes that its forward receives from the layers before it; its backward sends as many back.
      divisions: its division of each kind that divides any part of the layer.
      sequence_parallel: its division along ``model`` if values between tensor-parallel regions, such as norms
        and residuals, are divided, too; ``None`` where there are none.
      gathered: bytes of ``weights`` in the dtypes in which the layer reads them; ``None`` for the same bytes.
      recomputations: by policy but ``Remat.NONE``; all layers have the same policies.
    """

    name: str = dataclasses.field(compare=False)
    forward: TaskWork
    backward: TaskWork
    weights: int
    state: int
    gradients: int
    residuals: int
    entering: int
    divisions: Mapping[Kind, Division]
    sequence_parallel: Division | None = None
    gathered: int | None = None
    recomputations: Mapping[Remat, Recomputation] = dataclasses.field(default_factory=dict)

    def recomputation(self, policy: Remat) -> Recomputation:
        if policy is Remat.NONE:
            return Recomputation(self.residuals, TaskWork(0.0, 0.0), reduced=0.0)
        return self.recomputations[policy]


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """The table of a loop of a step, or of a step without a loop, which is one layer.

    Attributes:
      layers: in the order in which a microbatch passes through them.
      rows: the rows of the whole batch.
      microbatch_rows: the rows of the microbatch that the layers' numbers are for.
      num_microbatches: the number that the step itself fixes; ``None`` if it is open.
      are_stages: whether the user marked the stages, so that each layer is a stage.
      slices: the number of slices that the loss is a loop over, whose layers have the work of all slices; 1
        for a loss of whole microbatches.
      skips: values that go past layers, as source layer, target layer and bytes; values that go to the next
        layer are in its ``entering``.
      tied: layers that share weights, with the bytes; each of the layers counts them among its own.
      outside: the work outside the loop, for all weights: the optimizer. Of several loops, the work between
        this one and the next; of the first, also the work before it.
      batch: bytes of the whole batch.
      has_backward: whether there are backward tasks.
      between: the kind whose dimensions sequence parallelism divides along ``model``, too: ``sequence``, or
        ``data`` in a step without sequences; ``None`` without either.
      attention: the part of all layers' work that reads or makes scores of plain attention.
      specs: for each kind, the divided dimension of argument leaves, by the position of the leaf: of weights,
        of state that is combined with weights element by element, and of the batch. Equal for all loops.
      decision_index: the index of the loop's decisions in ``Decisions.of_loops``; ``None`` without a loop.
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
    slices: int = 1
    between: Kind | None = None
    attention: TaskWork = TaskWork(0.0, 0.0)

    @property
    def can_be_sequence_parallel(self) -> bool:
        """Whether any values between tensor-parallel regions can be divided along ``model``.

        Values of slices of sequences, and of a step without a loop, cannot.
        """
        in_loop = self.decision_index is not None and self.slices == 1
        return in_loop and any(layer.sequence_parallel is not None for layer in self.layers)

    def largest(self, kind: Kind) -> int | None:
        """The size that the number of devices along an axis has to divide; ``None`` if it divides nothing."""
        if kind == "data":
            return self.rows
        sizes = [layer.divisions[kind].largest for layer in self.layers if kind in layer.divisions]
        return math.gcd(*sizes) if sizes else None

    @functools.cached_property
    def policies(self) -> tuple[Remat, ...]:
        """The policies of rematerialisation that are worth trying, in order of the work that they
        recompute.

        Each policy keeps fewer bytes than the policies before it.
        """
        costs = {policy: self._cost(policy) for policy in (Remat.NONE, *self.layers[0].recomputations)}
        worth: list[Remat] = []
        for policy in sorted(costs, key=lambda policy: costs[policy]):
            if not worth or costs[policy][1] < costs[worth[-1]][1]:
                worth.append(policy)
        return tuple(worth)

    def _cost(self, policy: Remat) -> tuple[float, float]:
        """The repeated operations plus the bytes that they access, and the bytes of kept residuals."""
        each = [layer.recomputation(policy) for layer in self.layers]
        again = sum(one.work.operations + one.work.nbytes for one in each)
        return again, sum(one.residuals for one in each)
