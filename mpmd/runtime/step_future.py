"""The replies of the groups to one step."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import NoReturn

from mpmd.errors import StepAborted
from mpmd.runtime.callbacks import CallbackThreads
from mpmd.runtime.requests import Captured, StepReply, reply_of


class StepFuture:
    """One submitted step: holds the future reply of each group.

    Args:
      called: the end of the step's callbacks, if it has any.
      callbacks: the threads that run the step's callbacks.
      captured: is done when the failed task of the step has been written; ``None`` if none is to be written.
    """

    def __init__(
        self,
        replies: Mapping[int, Future[StepReply]],
        called: Future[None] | None = None,
        callbacks: CallbackThreads | None = None,
        captured: Future[None] | None = None,
    ):
        self._replies = replies
        self._called = called
        self._callbacks = callbacks
        self._captured = captured
        self._tracebacks: dict[int, TracebackType | None] = {}

    @property
    def has_failed(self) -> bool:
        """Whether the step is known to have failed on a group. Does not wait."""
        return any(reply.done() and reply.exception() is not None for reply in self._replies.values())

    def call_when_done(self, function: Callable[[bool], object]) -> None:
        """Calls a function, in any thread, with whether the step has failed, when all groups have replied."""
        call_when_done(self._replies.values(), function)

    def reply(self, mpmd_idx: int) -> StepReply:
        """Waits for the reply of a group and for the step's callbacks, unless the caller is a callback
        itself.

        Raises the error of the step, from whichever group; else the ``CallbackError`` of a callback.
        """
        called = self._called
        if called is not None and self._callbacks is not None and not self._callbacks.is_current():
            concurrent.futures.wait([called])
        try:
            reply = self._reply(mpmd_idx)
        except Exception:
            if self._captured is not None:  # who sees the error may end the program
                concurrent.futures.wait([self._captured])
            raise
        if called is not None and called.done() and (error := called.exception()) is not None:
            self._raise(error)
        return reply

    def reply_now(self, mpmd_idx: int) -> StepReply | None:
        """Returns the reply of a group if it has arrived and reports no failure, else ``None``. Does not
        wait."""
        reply = self._replies[mpmd_idx]
        has_reply = reply.done() and not reply.cancelled() and reply.exception() is None
        return reply.result() if has_reply else None

    def captured(self, mpmd_idx: int) -> tuple[Captured | None, BaseException | None]:
        """Waits for a group. Returns the task that it has kept, and the error of its part of the step."""
        reply = self._replies[mpmd_idx]
        return reply_of(reply).captured, reply.exception()

    def _reply(self, mpmd_idx: int) -> StepReply:
        error = self._replies[mpmd_idx].exception()
        if isinstance(error, StepAborted):  # the error itself, not that it reached this group
            errors = [reply.exception() for reply in self._replies.values()]
            error = next((e for e in errors if e is not None and not isinstance(e, StepAborted)), error)
        if error is not None:
            self._raise(error)
        return self._replies[mpmd_idx].result()

    def _raise(self, error: BaseException) -> NoReturn:
        """Raises an error with the traceback that it came with, without the frames of earlier reads."""
        raise error.with_traceback(self._tracebacks.setdefault(id(error), error.__traceback__))

    def replies(self) -> list[StepReply]:
        return [self.reply(mpmd_idx) for mpmd_idx in self._replies]


def call_when_done(futures: Collection[Future], function: Callable[[bool], object]) -> None:
    """Calls ``function`` in any thread, when all futures are done, with whether a future has failed."""
    num_futures, numbers, failures = len(futures), itertools.count(1), list[bool]()

    # It refers to no future: they would keep one another alive. Each thread gets another number.
    def on_done(future: Future) -> None:
        failures.append(future.exception() is not None)
        if next(numbers) == num_futures:
            function(any(failures))

    for future in futures:
        future.add_done_callback(on_done)
