"""Requests of the driver to groups, and their errors in terms of checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from mpmd.errors import CheckpointError, GroupDiedError
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Answer, Request


def ask(runtime: Runtime, mpmd_idx: int, request: Request[Answer]) -> Future[Answer]:
    try:
        return runtime.ask({mpmd_idx: request})[mpmd_idx]
    except RuntimeError as error:  # the mesh was closed
        future: Future[Answer] = Future()
        future.set_exception(error)
        return future


async def results(futures: Mapping[int, Future], what: str) -> dict[int, Any]:
    """Waits for the replies of all groups.

    Raises a group's error, with the group's number and ``what``.
    """
    errors = {i: await asyncio.to_thread(future.exception) for i, future in futures.items()}
    for mpmd_idx, error in errors.items():
        if isinstance(error, GroupDiedError):
            error.add_note(f"Group {mpmd_idx} was to {what}.")
            raise error
        if error is not None:
            message = f"group {mpmd_idx} could not {what}: {type(error).__name__}: {error}"
            raise CheckpointError(message, mpmd_idx) from error
    return {mpmd_idx: future.result() for mpmd_idx, future in futures.items()}
