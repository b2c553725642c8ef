"""A step that the groups have: its arrays, also if the caller is interrupted."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from mpmd.arguments.delivered import held_range
from mpmd.arrays.array import MpmdArray
from mpmd.arrays.stacked_array import StackedMpmdArray
from mpmd.compiler.steps import CutStep
from mpmd.ir.plan import OutputLeaf
from mpmd.ir.stack import Leaf, Stack, per_layer_range
from mpmd.runtime.in_flight import FedBack, QueuedStep
from mpmd.runtime.interrupts import DeferredInterrupt, drop_queued
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import INLINE_BYTES, Handle, StepReply
from mpmd.runtime.step_future import StepFuture


class _Pair(NamedTuple):
    """A layer range of an argument, and the output that takes its place."""

    leaf: int
    stack: Stack | None
    layer_range: int
    output: int


class DonatedState:
    """The state that a step takes over from its caller and returns updated.

    Args:
      argument_leaves: the step's argument leaves.
      fed_back: pairs of the positions of a layer range of an argument and of the output that takes its place.
      donated: for each leaf, whether the caller gives it up.
      outputs: the plan's outputs.
    """

    def __init__(
        self,
        argument_leaves: Sequence[Leaf],
        fed_back: Collection[tuple[int, int]],
        donated: Sequence[bool],
        outputs: Sequence[OutputLeaf],
    ):
        ranges = [
            (i, leaf.stack, n) for i, leaf in enumerate(argument_leaves) for n in range(len(leaf.names))
        ]
        pairs = [_Pair(*ranges[argument], output) for argument, output in fed_back]
        self._pairs = [pair for pair in pairs if donated[pair.leaf]]
        # Without the step, its caller has to have the state. Elsewhere only numbers to look at may be lost.
        is_small = all(leaf.aval.nbytes <= INLINE_BYTES for leaf in outputs)
        self._may_be_dropped = self._pairs == pairs and (bool(pairs) or is_small)

    def pairs(
        self, leaves: Sequence[Any], runtime: Runtime, results: Sequence[MpmdArray]
    ) -> list[tuple[MpmdArray, MpmdArray]]:
        """The donated arrays of a call that groups have, each with the result that takes its place."""
        held = [(held_range(leaves[pair.leaf], pair.stack, pair.layer_range), pair) for pair in self._pairs]
        return [
            (array, results[pair.output])
            for array, pair in held
            if array is not None and array.runtime is runtime
        ]

    def queued(
        self,
        number: int,
        pairs: Sequence[tuple[MpmdArray, MpmdArray]],
        replies: Mapping[int, Future[StepReply]],
    ) -> QueuedStep:
        """Returns the record of the step for the queue; state that came from the host may not be dropped."""
        fed_back = [FedBack(weakref.ref(result), result.handle, argument.held) for argument, result in pairs]
        can_drop = self._may_be_dropped and len(pairs) == len(self._pairs)
        return QueuedStep(number, can_drop, fed_back, replies)


class StepResults:
    """Makes the arrays of a step's result.

    Args:
      outputs: the plan's outputs.
      submeshes: the shapes of the groups' submeshes.
    """

    def __init__(self, step: CutStep, outputs: Sequence[OutputLeaf], submeshes: Sequence[AbstractMesh]):
        self._leaves = step.result_leaves
        self._avals = _part_avals(self._leaves, [result.var.aval for result in step.results])
        self._tree = jax.tree.structure(step.out_shape)
        self._outputs = outputs
        self._submeshes = submeshes

    def arrays(self, runtime: Runtime, handles: Sequence[Handle], future: StepFuture) -> list[MpmdArray]:
        return [
            MpmdArray(
                aval=aval,
                mpmd_idxs=leaf.mpmd_idxs,
                spec=leaf.spec or (),
                submeshes=tuple(self._submeshes[mpmd_idx] for mpmd_idx in leaf.mpmd_idxs),
                runtime=runtime,
                handle=handle,
                future=future,
            )
            for aval, leaf, handle in zip(self._avals, self._outputs, handles, strict=True)
        ]

    def joined(self, arrays: Sequence[MpmdArray]) -> Any:
        """The result as the caller gets it, of the arrays of its layer ranges."""
        rest = iter(arrays)
        leaves = [_joined(leaf, tuple(next(rest) for _ in leaf.names)) for leaf in self._leaves]
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


def _joined(leaf: Leaf, ranges: tuple[MpmdArray, ...]) -> MpmdArray:
    if leaf.stack is None:
        return ranges[0]
    aval = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    return StackedMpmdArray(aval, leaf.stack, ranges)


@dataclasses.dataclass(frozen=True)
class SubmittedStep:
    """A step that all groups have.

    Attributes:
      result: as the caller gets it.
      pairs: donated arrays, each with the array of the result that takes its place, or the part of one.
    """

    queued: QueuedStep
    future: StepFuture
    result: Any
    pairs: Sequence[tuple[MpmdArray, MpmdArray]]

    def interrupt(self, runtime: Runtime, interrupt: BaseException) -> None:
        """The caller does not get the results: has donated arrays stand for the new state.

        Then drops queued steps, perhaps also this one; adds notes to the interrupt.
        """
        with DeferredInterrupt():
            for (argument, result), fed_back in zip(self.pairs, self.queued.fed_back, strict=True):
                argument.take_over(result)
                fed_back.array = weakref.ref(argument)
        dropped = drop_queued(runtime, interrupt)
        if self.pairs and self.queued.number not in dropped:
            interrupt.add_note(
                "mpmd: the step that was being called will end. The state that was donated to it by groups' "
                "arrays is now what it returns; its other results are lost"
            )
