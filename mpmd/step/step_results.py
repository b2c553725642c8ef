"""The arrays of a step's result, which exist as soon as the groups have the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from mpmd.arguments.call import Call
from mpmd.arguments.leaves import as_described
from mpmd.arrays.array import Held, MpmdArray
from mpmd.arrays.stacked_array import StackedMpmdArray
from mpmd.compiler.steps import CutStep
from mpmd.ir.placement import Placement
from mpmd.ir.plan import OutputLeaf
from mpmd.ir.stack import Leaf, Stack, per_layer_range
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle
from mpmd.runtime.step_future import StepFuture


class StepResults:
    def __init__(self, step: CutStep, outputs: Sequence[OutputLeaf], submeshes: Sequence[AbstractMesh]):
        self._leaves = step.result_leaves
        avals = _part_avals(self._leaves, [result.var.aval for result in step.results])
        self._arrays = [
            (
                aval,
                Placement(leaf.mpmd_idxs, leaf.spec or ()),
                tuple(submeshes[mpmd_idx] for mpmd_idx in leaf.mpmd_idxs),
            )
            for aval, leaf in zip(avals, outputs, strict=True)
        ]
        self._tree = jax.tree.structure(step.out_shape)

    def of_step(self, runtime: Runtime, handles: Sequence[Handle], future: StepFuture) -> Any:
        arrays = (
            MpmdArray(aval, runtime, Held(placement, submeshes, handle, future))
            for (aval, placement, submeshes), handle in zip(self._arrays, handles, strict=True)
        )
        leaves = [
            next(arrays) if leaf.stack is None else _stacked(leaf, leaf.stack, arrays)
            for leaf in self._leaves
        ]
        return jax.tree.unflatten(self._tree, leaves)


def _part_avals(leaves: Sequence[Leaf], avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shape, dtype and weak type of each layer range of the results.

    Weak types come from JAX's trace: the equations that passes write do not keep them.
    """
    weak = per_layer_range(leaves, [leaf.weak_type for leaf in leaves])
    return [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak)
        for aval, is_weak in zip(avals, weak, strict=True)
    ]


def _stacked(leaf: Leaf, stack: Stack, ranges: Iterator[MpmdArray]) -> StackedMpmdArray:
    return StackedMpmdArray(as_described(leaf), stack, tuple(itertools.islice(ranges, len(stack.slices))))


def hand_back(call: Call, results: Sequence[Any], fed_back: Mapping[int, int]) -> bool:
    """Makes donated arrays stand for the results that a training loop would pass in their place.

    So a caller who does not get the results, as after an interrupt, still has the state.

    Args:
      call: the call of the step, or of the first of several steps.
      results: the leaves of the last step's result.
      fed_back: the position of the result leaf that replaces an argument leaf, by the argument's position.

    Returns: whether any array of groups was donated and replaced. Arrays of the host are not.
    """
    is_any = False
    for i, j in fed_back.items():
        argument, result = call.leaves[i], results[j]
        if not (call.donated[i] and isinstance(argument, MpmdArray)):
            continue
        if argument.runtime is result.runtime and argument.stack == result.stack:
            for donated, returned in zip(argument.parts, result.parts, strict=True):
                if not returned.is_deleted():  # a later step that has failed may have taken it over
                    donated.take_over(returned)
                    is_any = True
    return is_any
