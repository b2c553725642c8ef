"""Lines about the progress of ``mpmd.plan`` on stderr, one a second, from the records of its logger."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

INTERVAL = 1.0


class _Latest(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.message = "tracing the step"

    def emit(self, record: logging.LogRecord) -> None:
        self.message = record.getMessage()


@contextlib.contextmanager
def progress_lines() -> Iterator[None]:
    logger, latest, done = logging.getLogger("mpmd.planner"), _Latest(), threading.Event()
    start, level = time.monotonic(), logger.level

    def print_lines() -> None:
        while not done.wait(INTERVAL):
            print(f"{time.monotonic() - start:.0f} s: {latest.message}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=print_lines, daemon=True)
    logger.addHandler(latest)
    logger.setLevel(logging.DEBUG)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        logger.setLevel(level)
        logger.removeHandler(latest)
