"""Waits for something of which nobody is notified."""

import time


def await_that(condition, seconds=20):
    """Returns what the condition gives, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
