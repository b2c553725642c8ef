"""The steps that the driver has submitted and the groups have not answered, and their largest number."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from mpmd.ir.plan import Spec
from mpmd.runtime.requests import Handle, StepReply
from mpmd.runtime.step_future import StepFuture, call_when_done
from mpmd.validation import int_fault, raise_faults

MAX_IN_FLIGHT = 16
"""Steps that are submitted and not answered, by default: enough for a driver that is sometimes late."""


class Held(NamedTuple):
    """A value of groups that an array of the caller's stands for; the attributes are as of ``MpmdArray``."""

    mpmd_idxs: tuple[int, ...]
    spec: Spec
    submeshes: tuple[AbstractMesh, ...]
    handle: Handle
    future: StepFuture


@dataclasses.dataclass(slots=True)
class FedBack:
    """A result of a step that takes the place of an argument, which was donated to the step.

    Attributes:
      array: the ``MpmdArray`` of the result, as long as the caller has it.
      handle: that of the result.
      argument: the value that was donated.
    """

    array: weakref.ref[Any]
    handle: Handle
    argument: Held


@dataclasses.dataclass
class QueuedStep:
    """A step that was submitted, and that not all groups have answered.

    Attributes:
      number: as of the step's requests.
      can_drop: whether only the step's own results are lost if no group runs it.
      fed_back: the state that it takes and returns.
      replies: of the groups, by their numbers.
      thread: the one that has called it.
    """

    number: int
    can_drop: bool
    fed_back: Sequence[FedBack]
    replies: Mapping[int, Future[StepReply]]
    thread: int = dataclasses.field(default_factory=threading.get_ident)


class StepsInFlight:
    """Lets a limited number of steps of each part be under way, whose arguments both ends hold. Thread-safe.

    Parts have their names; ``None`` is the whole mesh.

    Raises: ``TypeError`` or ``ValueError`` for a limit that is no positive int.
    """

    def __init__(self, limit: int = MAX_IN_FLIGHT):
        raise_faults(int_fault("max_in_flight", limit))
        self._places: dict[str | None, threading.Semaphore]
        self._places = collections.defaultdict(functools.partial(threading.Semaphore, limit))
        self._queued: dict[int, QueuedStep] = {}

    def enter(self, part: str | None = None) -> None:
        """Waits until the next step of a part may be submitted; then ``leave`` or ``leave_after``."""
        self._places[part].acquire()

    def leave(self, part: str | None = None) -> None:
        """The step was not submitted."""
        self._places[part].release()

    def leave_after(
        self,
        replies: Collection[Future],
        step: QueuedStep | None = None,
        on_end: Callable[[bool], object] = lambda has_failed: None,
        part: str | None = None,
    ) -> None:
        """The step ends when all groups have replied, or have failed to.

        Args:
          on_end: is called then, in any thread, with whether the step has failed.
        """
        number = None
        if step is not None:
            number = step.number
            self._queued[number] = step

        # A reply keeps the function: through the step, each would keep those of the step before alive.
        def end(has_failed: bool) -> None:
            on_end(has_failed)
            if number is not None:
                del self._queued[number]
            self._places[part].release()

        call_when_done(replies, end)

    def queued(self) -> list[QueuedStep]:
        """The steps that were submitted and have not ended, in order."""
        return list(self._queued.values())

    def keep_queued(self) -> None:
        """Keeps all steps until now from being dropped: the next request relies on them."""
        for step in self.queued():
            step.can_drop = False

    def may_be_given_back(self) -> frozenset[Handle]:
        """The values donated to steps that may be dropped: groups have to keep them until these begin."""
        return frozenset(
            state.argument.handle for step in self.queued() if step.can_drop for state in step.fed_back
        )
