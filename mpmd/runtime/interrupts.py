"""Interrupts by the user: submission is whole, and steps that no group has begun are dropped."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any

from mpmd.runtime.in_flight import Held, QueuedStep
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle


class DeferredInterrupt:
    """A context at whose end Python hears of a first SIGINT that came within it; of a second one at once.

    Only the main thread gets signals, so it does nothing in others, nor where no handler of Python's is set.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted = number, frame
        else:  # whatever is waited for here, the program can be ended
            self._noted = None
            self._handler(number, frame)

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._noted is not None:
                self._handler(*self._noted)


@contextlib.contextmanager
def dropping_queued(runtime: Runtime) -> Iterator[None]:
    """A context whose interrupt drops the steps that no group has begun, and gets a note about them."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        drop_queued(runtime, interrupt)
        raise


def drop_queued(runtime: Runtime, interrupt: BaseException) -> Collection[int]:
    """Drops the last steps of this thread that no group has begun, as if they had not been called.

    Steps that other threads have called run on, such as those of another part of the mesh.
    The arrays of the state that they were to return stand for the state donated to the first of them. All
    other results raise ``StepDroppedError``. Waits for no step. Adds a note to the interrupt.

    Returns: the numbers of the steps.
    """
    with DeferredInterrupt():
        queued = runtime.in_flight.queued()
        last = _last_of_this_thread(queued)
        numbers = runtime.drop(last) if last else frozenset()
        dropped = [step for step in last if step.number in numbers]
        _give_back(runtime, dropped)
    if queued:
        interrupt.add_note(_note(len(dropped), len(queued) - len(dropped)))
    return numbers


def _last_of_this_thread(queued: Sequence[QueuedStep]) -> list[QueuedStep]:
    """The steps that may be dropped: no step that runs on comes after them on a group of theirs."""
    last, running = [], set[int]()
    for step in reversed(queued):
        if step.can_drop and step.thread == threading.get_ident() and running.isdisjoint(step.replies):
            last.append(step)
        else:
            running.update(step.replies)
    return last[::-1]


def _give_back(runtime: Runtime, dropped: Sequence[QueuedStep]) -> None:
    """Makes the arrays of fed-back state stand for the donated values, unless another array does."""
    donated: dict[Handle, Held] = {
        result.handle: result.argument for step in dropped for result in step.fed_back
    }
    for step in reversed(dropped):
        for result in step.fed_back:
            array, held = result.array(), result.argument
            if array is None or array.is_deleted():
                continue
            while held.handle in donated:
                held = donated[held.handle]
            if runtime.take_back(held.mpmd_idxs, held.handle):
                array.hold(held)


def _note(dropped: int, remaining: int) -> str:
    """The note that says how many queued steps were dropped, and which run on."""
    parts = []
    if dropped:
        parts.append(
            f"{_steps(dropped)} dropped, which no group had begun. The state that was donated is what it was "
            "before; other results of theirs raise mpmd.StepDroppedError"
        )
    if remaining:
        parts.append(f"{_steps(remaining)} submitted before the interrupt, and will end")
    return "mpmd: " + ". ".join(parts)


def _steps(count: int) -> str:
    return "1 step was" if count == 1 else f"{count} steps were"
