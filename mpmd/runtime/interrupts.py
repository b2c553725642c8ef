"""Interrupts by the user: a step that is being submitted reaches all groups before SIGINT is handled."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredInterrupt:
    """A context that handles a first SIGINT at its end, and a second SIGINT at once.

    Does nothing in other threads than the main thread, which alone gets signals, and where the handler of
    SIGINT is not a Python function.
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
