"""The lock of a ledger, which makes calls that may take long only after it was released."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

from mpmd.runtime.interrupts import DeferredInterrupt


class Lock(threading.Condition):
    """A reentrant lock with a condition, whose owner may defer calls until it has released the lock.

    A future's callbacks run in the thread that settles it, and may wait for a thread that needs the lock. An
    interrupt is raised after the call that it arrives in: nobody would settle that call's future otherwise.
    """

    def __init__(self) -> None:
        super().__init__(threading.RLock())
        self._depth = 0  # how many ``with`` statements the owner is in
        self._deferred = queue.SimpleQueue[Callable[[], object]]()

    def defer(self, call: Callable[[], object]) -> None:
        """Has the owner make a call when it has left its outermost ``with``, or waits.

        A thread that has just released the lock may make the call before.
        """
        assert self._depth, "only the owner of the lock defers calls"
        self._deferred.put(call)

    def __enter__(self) -> bool:
        entered = super().__enter__()
        self._depth += 1
        return entered

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        is_released = not self._depth
        self.release()
        if is_released:
            self._make_calls()

    def wait(self, timeout: float | None = None) -> bool:
        """As ``threading.Condition.wait``. Returns early when there were deferred calls to make."""
        if not self._deferred.empty():
            with DeferredInterrupt(), self._released():
                return True
        depth, self._depth = self._depth, 0
        try:
            return super().wait(timeout)
        finally:
            self._depth = depth

    @contextlib.contextmanager
    def _released(self) -> Iterator[None]:
        depth, self._depth = self._depth, 0
        for _ in range(depth):
            self.release()
        try:
            self._make_calls()
            yield
        finally:
            for _ in range(depth):
                self.acquire()
            self._depth = depth

    def _make_calls(self) -> None:
        # One by one: if a call raises, the next thread that releases the lock makes the others.
        while not self._deferred.empty():
            with DeferredInterrupt(), contextlib.suppress(queue.Empty):
                self._deferred.get_nowait()()
