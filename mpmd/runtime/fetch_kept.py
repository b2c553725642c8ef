"""Brings the task that a group has kept to the driver."""

from __future__ import annotations

import numpy as np

from mpmd.runtime.captures import KeptTask
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Captured


def fetch_kept(runtime: Runtime, captured: Captured, error: BaseException | None) -> KeptTask:
    """Brings what a group has kept here, and has the group drop it.

    Raises: what ``fetch`` of the runtime raises, as when the group has died.
    """
    handles = captured.handles
    try:
        fetching = [None if h is None else runtime.fetch(captured.mpmd_idx, h) for h in handles]
        values = [None if future is None else np.asarray(future.result()) for future in fetching]
    finally:
        drop_kept(runtime, captured)
    return KeptTask(
        captured=captured,
        inputs=tuple(values[: captured.num_inputs]),
        results=tuple(value for value in values[captured.num_inputs :] if value is not None),
        error=None if error is None else str(error),
    )


def drop_kept(runtime: Runtime, captured: Captured) -> None:
    """Asks a group to drop its captured operands and results with its next request."""
    for handle in captured.handles:
        if handle is not None:
            runtime.free((captured.mpmd_idx,), handle)
