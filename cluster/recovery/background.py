"""The work of recovery beside the program: threads, and lines on stderr."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable

from cluster.driver.ray_session import RaySession
from cluster.recovery.ledger import Ledger
from cluster.recovery.processes import Processes


class Background:
    """Carries out operations in threads, until the run has ended."""

    def __init__(self, ledger: Ledger, processes: Processes):
        self._ledger = ledger
        self._processes = processes
        self._session = RaySession()

    @property
    def has_ended(self) -> bool:
        return self._ledger.error is not None or not self._session.is_connected

    def start(self, name: str, operation: Callable[[], None]) -> None:
        threading.Thread(target=self._run, args=(operation,), name=f"mpmd {name}", daemon=True).start()

    def _run(self, operation: Callable[[], None]) -> None:
        """Carries out an operation. A fault ends the run, and not the thread alone."""
        try:
            operation()
        except BaseException as fault:
            with self._ledger.changed:
                self._ledger.end(RuntimeError(f"the groups cannot be looked after: {fault!r}"))
            raise
        finally:
            if self._ledger.error is not None:
                self._processes.release()  # also the processes that the operation may have started since

    def say(self, text: object) -> None:
        with self._ledger.changed:
            self._ledger.changed.defer(functools.partial(_print, text))

    def say_unless_ended(self, text: str) -> None:
        """Tells the user of something that the end of the run, or of Ray, may have caused."""
        if not self.has_ended:
            self.say(text)


def _print(text: object) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(f"cluster: {text}", file=sys.stderr, flush=True)
