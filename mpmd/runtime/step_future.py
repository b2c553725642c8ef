"""The replies of the groups to one step."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from concurrent.futures import Future

from mpmd.errors import StepAborted
from mpmd.runtime.callbacks import CallbackThread
from mpmd.runtime.requests import StepReply


class StepFuture:
    """One submitted step: the reply of each group, once it is there.

    Args:
      called: the end of the step's callbacks, if it has any.
      callbacks: the thread that calls them.
    """

    def __init__(
        self,
        replies: Mapping[int, Future[StepReply]],
        called: Future[None] | None = None,
        callbacks: CallbackThread | None = None,
    ):
        self._replies = replies
        self._called = called
        self._callbacks = callbacks

    def reply(self, mpmd_idx: int) -> StepReply:
        """Waits for the reply of a group, and for the step's callbacks unless it is one of them that waits.

        Raises the error of the step, whichever group it is from; else the ``CallbackError`` of a callback.
        """
        called = self._called
        if called is not None and self._callbacks is not None and not self._callbacks.is_current():
            concurrent.futures.wait([called])
        reply = self._reply(mpmd_idx)
        if called is not None and called.done():
            called.result()
        return reply

    def _reply(self, mpmd_idx: int) -> StepReply:
        try:
            return self._replies[mpmd_idx].result()
        except StepAborted:
            for reply in self._replies.values():
                error = reply.exception()
                if error is not None and not isinstance(error, StepAborted):
                    raise error from error.__cause__  # the error itself, not that it reached this group
            raise

    def replies(self) -> list[StepReply]:
        """Waits for all groups."""
        return [self.reply(mpmd_idx) for mpmd_idx in self._replies]
