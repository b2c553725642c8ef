"""One future of the replies of all processes of a group."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from mpmd.errors import StepAborted


def failed(error: BaseException) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future


def awaited() -> Future:
    """A future that cannot be cancelled: the group has the request, and its reply settles the future."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


def joined(futures: Sequence[Future], combine: Callable[[list[Any]], Any]) -> Future:
    """A future of ``combine`` applied to the results of all ``futures``, in their order.

    When some futures fail, it raises the first error that is not only the abort of a step.
    """
    whole = awaited()
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    left = [len(futures)]
    lock = threading.Lock()

    # It refers to no future but the whole: otherwise they would keep one another alive, and their results.
    def settle(index: int, future: Future) -> None:
        with lock:
            error = future.exception()
            if error is None:
                results[index] = future.result()
            else:
                errors.append(error)
            left[0] -= 1
            if left[0]:
                return
        if errors:
            whole.set_exception(min(errors, key=lambda error: isinstance(error, StepAborted)))
        else:
            _complete(whole, combine, [results.pop(i) for i in sorted(results)])

    for index, future in enumerate(futures):
        future.add_done_callback(functools.partial(settle, index))
    return whole


def _complete(whole: Future, combine: Callable[[list[Any]], Any], results: list[Any]) -> None:
    try:
        whole.set_result(combine(results))
    except Exception as error:  # for the caller, who waits for the future
        whole.set_exception(error)
