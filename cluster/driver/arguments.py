"""Selects the slices of a step's host arrays that each process's devices hold, to send these only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.protocol.packing import PackedValue, pack
from mpmd.ir.plan import Aval, Plan, Spec
from mpmd.ir.reshard import Box, GroupShape, boxes_by_process, merged
from mpmd.runtime.requests import Handle, StepRequest

Boxes = tuple[Box, ...] | None
"""The slices of an array that a process needs; ``None`` for the whole array."""


class HostArguments:
    def __init__(self, plan: Plan, groups: Sequence[GroupShape]):
        # For each group, for each of its inputs, what each process needs.
        self._boxes = [
            [_boxes(leaf.aval, leaf.spec, shape) for leaf in plan.inputs_of(mpmd_idx).values()]
            for mpmd_idx, shape in enumerate(groups)
        ]

    def packed(self, mpmd_idx: int, rank: int, request: StepRequest) -> dict[Handle, PackedValue]:
        # A handle stands for an array in one sharding, whichever inputs it is.
        by_handle = dict(zip(request.inputs, self._boxes[mpmd_idx], strict=True))
        return {
            handle: _packed(array, by_handle[handle][rank]) for handle, array in request.host_arrays.items()
        }


def _boxes(aval: Aval, spec: Spec, shape: GroupShape) -> Sequence[Boxes]:
    if not aval.nbytes:
        return [None] * shape.num_processes
    held = [tuple(merged(boxes)) for boxes in boxes_by_process(aval.shape, spec, shape)]
    whole = tuple((0, size) for size in aval.shape)
    return [None if boxes == (whole,) else boxes for boxes in held]


def _packed(array: np.ndarray, boxes: Boxes) -> PackedValue:
    if boxes is None:
        return PackedValue(array.shape, ((None, pack(array)),))
    indices = [tuple(slice(*interval) for interval in box) for box in boxes]
    # What is contiguous is pickled without a copy.
    return PackedValue(array.shape, tuple((i, pack(np.ascontiguousarray(array[i]))) for i in indices))
