"""Threads that go on when the test says so, and the two places where they wait."""

import threading
from concurrent.futures import Future

from cluster.recovery.lock import Lock


class Thread:
    """A thread that runs only within ``go_on``.

    Attributes:
      at: the phase or wait where it has stopped.
      condition: a function that says whether its wait is over; ``None`` where it waits for nothing.
      may_expire: whether its wait has a time limit.
    """

    def __init__(self, operation):
        self.at, self.condition, self.may_expire = "begin", None, False
        self.is_alive, self.fault = True, None
        self._turns = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(operation,), daemon=True)
        self._thread.start()

    def _run(self, operation):
        self._turns[0].acquire()
        try:
            operation()
        except BaseException as fault:
            self.fault = fault
        self.is_alive = False
        self._turns[1].release()

    def is_ready(self, expired=False):
        return self.condition is None or self.condition() or (expired and self.may_expire)

    def go_on(self):
        self._turns[0].release()
        self._turns[1].acquire()
        if self.fault is not None:
            raise self.fault

    def stop(self, at, condition=None, may_expire=False):
        self.at, self.condition, self.may_expire = at, condition, may_expire
        self._turns[1].release()
        self._turns[0].acquire()


class Condition(Lock):
    """A ledger's lock. A thread that would wait for a condition stops until the test has it go on."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def wait_for(self, condition, timeout=None):
        if not condition():
            assert self.world.running is not None, "the test itself would wait"
            with self._released():
                self.world.running.stop("wait", condition, timeout is not None)
        return condition()


class Awaited(Future):
    """The answer of a group to the request for a snapshot, for which a thread waits."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def result(self, timeout=None):
        if not self.done():
            self.world.running.stop("copied", self.done)
        return super().result(0)
