"""Brings the task that a group has kept to the driver."""

from __future__ import annotations

import numpy as np

from mpmd.runtime.captures import KeptTask
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Captured


def fetch_kept(runtime: Runtime, captured: Captured, error: BaseException | None) -> KeptTask:
    """Fetches a captured task's operands and results, and has the group drop them.

    Raises: what ``fetch`` of the runtime raises, as when the group has died.
    """
    try:
        values = runtime.fetch(captured.mpmd_idx, captured.capture.handle).result()
    finally:
        drop_kept(runtime, captured)
    arrays = map(np.asarray, values)
    return KeptTask(
        captured=captured,
        inputs=tuple(None if i in captured.lost else next(arrays) for i in range(captured.num_inputs)),
        results=tuple(arrays),
        error=None if error is None else str(error),
    )


def drop_kept(runtime: Runtime, captured: Captured) -> None:
    runtime.free((captured.mpmd_idx,), captured.capture.handle)
