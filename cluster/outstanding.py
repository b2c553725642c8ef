"""What the driver waits for, and what follows from a failure. Knows neither Ray nor JAX.

Events go in (a call was made, it succeeded, it failed, a group died); futures are settled, and the steps
that the groups must be told to abort come out.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from mpmd.errors import GroupDiedError, StepAborted


@dataclasses.dataclass(frozen=True)
class Abort:
    """All groups shall stop waiting for messages of a step."""

    step: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Ticket:
    """One call on one group, and the future that its caller holds: of what ``decode`` makes of the reply."""

    number: int
    mpmd_idx: int
    step: int | None
    future: Future
    decode: Callable[[Any], Any]


@dataclasses.dataclass
class _Step:
    mpmd_idxs: frozenset[int]
    unsettled: int
    failure: BaseException | None = None


class Outstanding:
    """The calls that were made and not yet answered. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._tickets: dict[int, Ticket] = {}
        self._steps: dict[int, _Step] = {}
        self._dead: dict[int, GroupDiedError] = {}
        self._closed: BaseException | None = None

    def add(
        self,
        mpmd_idxs: Iterable[int],
        step: int | None = None,
        decode: Callable[[Any], Any] = lambda reply: reply,
    ) -> list[Ticket]:
        """Notes a call on each of the groups; with ``step``, these calls are that step.

        Raises: ``GroupDiedError`` when one of the groups is dead, the error given to ``close`` after it;
        then nothing is noted.
        """
        mpmd_idxs = tuple(mpmd_idxs)
        with self._lock:
            for failure in (self._closed, *(self._dead.get(mpmd_idx) for mpmd_idx in mpmd_idxs)):
                if failure is not None:
                    raise _again(failure)
            if step is not None:
                assert step not in self._steps, f"step {step} is still running"
                self._steps[step] = _Step(frozenset(mpmd_idxs), len(mpmd_idxs))
            tickets = [
                Ticket(next(self._numbers), mpmd_idx, step, _running(), decode) for mpmd_idx in mpmd_idxs
            ]
            self._tickets.update((ticket.number, ticket) for ticket in tickets)
        return tickets

    @property
    def in_step(self) -> bool:
        """Whether a step has not ended everywhere."""
        with self._lock:
            return bool(self._steps)

    def find(self, number: int) -> Ticket | None:
        """The call of this number; ``None`` when it was settled, because its group or its step was lost."""
        return self._tickets.get(number)

    def succeed(self, ticket: Ticket, result: Any) -> None:
        """Settles a call; one that was settled before stays as it was."""
        with self._lock:
            found = self._take(ticket)
        if found:
            ticket.future.set_result(result)

    def fail(self, ticket: Ticket, error: BaseException) -> list[Abort]:
        """Settles a call. The first failure of a step is the reason why the step is aborted."""
        aborts: list[Abort] = []
        with self._lock:
            if ticket.step is not None and ticket.number in self._tickets:
                step = self._steps[ticket.step]
                aborts = self._spoil([ticket.step], error)
                if isinstance(error, StepAborted) and step.failure is not error:
                    error.__cause__ = step.failure
            found = self._take(ticket)
        if found:
            ticket.future.set_exception(error)
        return aborts

    def bury(self, mpmd_idx: int, error: GroupDiedError) -> list[Abort]:
        """Notes that a group is dead: its calls fail, now and later, and all steps it has a part in.

        Also those in which its own part has ended: its last messages may have died with it. The calls of
        such a step fail on all groups at once, not when the others have come to notice.
        """
        with self._lock:
            error = self._dead.setdefault(mpmd_idx, error)
            shared = [number for number, step in self._steps.items() if mpmd_idx in step.mpmd_idxs]
            aborts = self._spoil(shared, error)
            lost = [t for t in self._tickets.values() if t.mpmd_idx == mpmd_idx or t.step in shared]
            for ticket in lost:
                self._take(ticket)
        for ticket in lost:
            ticket.future.set_exception(_again(error))
        return aborts

    def close(self, error: BaseException) -> None:
        """Fails every call, now and later, with ``error``."""
        with self._lock:
            self._closed = self._closed or error
            tickets = list(self._tickets.values())
            self._tickets.clear()
            self._steps.clear()
        for ticket in tickets:
            ticket.future.set_exception(_again(error))

    def _spoil(self, steps: Iterable[int], error: BaseException) -> list[Abort]:
        fresh = [number for number in steps if self._steps[number].failure is None]
        for number in fresh:
            self._steps[number].failure = error
        return [Abort(number, str(error)) for number in fresh]

    def _take(self, ticket: Ticket) -> bool:
        if self._tickets.pop(ticket.number, None) is None:
            return False
        if ticket.step is not None:
            step = self._steps[ticket.step]
            step.unsettled -= 1
            if not step.unsettled:
                del self._steps[ticket.step]
        return True


def _running() -> Future:
    future: Future = Future()
    future.set_running_or_notify_cancel()  # the groups have been asked; cancelling would settle it twice
    return future


def _again(error: BaseException) -> BaseException:
    """An equal error: one that several threads raised would collect the tracebacks of all of them."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
