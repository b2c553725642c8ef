"""The driver's end of callbacks: calls the user's functions, in the order of the traced step."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from mpmd.errors import CallbackError
from mpmd.ir.plan import Plan, Task
from mpmd.language.callbacks import HostCallback
from mpmd.runtime.requests import CallbackOperands, StepReply, reply_of

_logger = logging.getLogger(__name__)


class CallbackThreads:
    """Calls functions in a thread for each part, one after the other, as the part's steps were submitted.

    At exit, Python waits for the threads, and so for the steps that they wait for.
    """

    def __init__(self) -> None:
        self._idents: list[int] = []
        self._executors: dict[str | None, ThreadPoolExecutor] = {}

    def is_current(self) -> bool:
        return threading.get_ident() in self._idents

    def call_after(
        self,
        replies: Iterable[Future[StepReply]],
        callbacks: Sequence[HostCallback],
        plan: Plan,
        part: str | None,
    ) -> Future[None]:
        """Calls the callbacks of a part's step when all groups have replied or failed; returns at once.

        After a failed step, calls only the callbacks whose operands were computed before the failure. Lines
        that tasks print begin with the plan's names of their stages.

        Returns: a future that raises ``CallbackError`` when a function raised; later functions of the step
        are not called.
        """
        enable_x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        return self._executor(part).submit(_call_all, tuple(replies), tuple(callbacks), plan, enable_x64)

    def wait(self) -> None:
        """Waits for all that was submitted; not in one of the threads, whose call would wait for itself."""
        if not self.is_current():
            for executor in list(self._executors.values()):
                executor.submit(lambda: None).result()

    def _executor(self, part: str | None) -> ThreadPoolExecutor:
        if part not in self._executors:
            note = self._idents.append  # no method of this object, which would live until garbage collection
            thread = ThreadPoolExecutor(1, "mpmd callbacks", initializer=lambda: note(threading.get_ident()))
            self._executors.setdefault(part, thread)
        return self._executors[part]


def _call_all(
    replies: Sequence[Future[StepReply]], callbacks: Sequence[HostCallback], plan: Plan, enable_x64: bool
) -> None:
    concurrent.futures.wait(replies)
    calls = [
        (order, callbacks[sent.callback], sent, operands)
        for reply in replies
        for sent in reply_of(reply).callback_operands
        for order, operands in callbacks[sent.callback].calls(_microbatch(sent), sent.values)
    ]
    with jax.enable_x64(enable_x64):
        for _, callback, sent, operands in sorted(calls, key=lambda call: call[0]):
            try:
                callback.call(operands, _mark(sent, plan))
            except Exception as error:
                where = f"{callback}, {_mark(sent, plan).strip() or sent.task}"
                failure = CallbackError(f"{where}, raised {type(error).__name__}: {error}")
                _logger.error("%s", failure, exc_info=error)  # also if no result of the step is ever read
                raise failure from error


def _microbatch(sent: CallbackOperands) -> int | None:
    return sent.task.microbatch if isinstance(sent.task, Task) else None


def _mark(sent: CallbackOperands, plan: Plan) -> str:
    if not isinstance(sent.task, Task):
        return ""
    return f"[{plan.stage_text(sent.task.stage)}, microbatch {sent.task.microbatch}] "
