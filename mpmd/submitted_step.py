"""A step that the groups have: its arrays, and what becomes of these if the caller is interrupted."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from mpmd.arguments.delivered import held_part
from mpmd.array import MpmdArray
from mpmd.ir import OutputLeaf
from mpmd.runtime.in_flight import FedBack, QueuedStep
from mpmd.runtime.interrupts import DeferredInterrupt, drop_queued
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import INLINE_BYTES, StepReply
from mpmd.runtime.step_future import StepFuture
from mpmd.stack import Leaf, Stack


class _Pair(NamedTuple):
    """A part of an argument, and the output that takes its place."""

    leaf: int
    stack: Stack | None
    part: int
    output: int


class DonatedState:
    """The state that a step takes over from its caller and returns anew.

    Args:
      argument_leaves: those of the step.
      fed_back: pairs of the positions of a part of an argument and of the output that takes its place.
      donated: for each leaf, whether the caller gives it up.
      outputs: those of the plan.
    """

    def __init__(
        self,
        argument_leaves: Sequence[Leaf],
        fed_back: Collection[tuple[int, int]],
        donated: Sequence[bool],
        outputs: Sequence[OutputLeaf],
    ):
        parts = [
            (i, leaf.stack, part) for i, leaf in enumerate(argument_leaves) for part in range(len(leaf.names))
        ]
        pairs = [_Pair(*parts[argument], output) for argument, output in fed_back]
        self._pairs = [pair for pair in pairs if donated[pair.leaf]]
        # Without the step, its caller has to have the state. Elsewhere only numbers to look at may be lost.
        is_small = all(leaf.aval.nbytes <= INLINE_BYTES for leaf in outputs)
        self._may_be_dropped = self._pairs == pairs and (bool(pairs) or is_small)

    def pairs(
        self, leaves: Sequence[Any], runtime: Runtime, results: Sequence[MpmdArray]
    ) -> list[tuple[MpmdArray, MpmdArray]]:
        """The donated arrays of a call that groups have, each with the result that takes its place."""
        held = [(held_part(leaves[pair.leaf], pair.stack, pair.part), pair) for pair in self._pairs]
        return [
            (array, results[pair.output])
            for array, pair in held
            if array is not None and array.runtime is runtime
        ]

    def queued(
        self,
        number: int,
        pairs: Sequence[tuple[MpmdArray, MpmdArray]],
        replies: Collection[Future[StepReply]],
    ) -> QueuedStep:
        """What dropping the step needs. State that came from the host with it would be lost, so it runs."""
        fed_back = [FedBack(weakref.ref(result), result.handle, argument.held) for argument, result in pairs]
        can_drop = self._may_be_dropped and len(pairs) == len(self._pairs)
        return QueuedStep(number, can_drop, fed_back, replies)


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
