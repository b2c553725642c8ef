"""Translates Ray's errors into the errors of ``mpmd``."""

from __future__ import annotations

from ray import exceptions

from cluster.endpoint import Endpoint
from mpmd.errors import GroupDiedError

_DEATHS = (
    exceptions.RayActorError,
    exceptions.OutOfMemoryError,  # Ray's memory monitor has killed the process
    exceptions.NodeDiedError,
    exceptions.WorkerCrashedError,
)


def translate(error: BaseException, process: Endpoint) -> BaseException:
    """The error to show to a user when a call on the actor of a process has failed with ``error``.

    An exception that the actor raised is returned as itself, with the remote traceback as its
    ``__cause__``; the death of the actor as ``GroupDiedError``.
    """
    error = error.with_traceback(None)  # it is that of a thread of the driver, which explains nothing
    if isinstance(error, exceptions.RayTaskError):
        cause: BaseException = error.cause
        cause.__cause__ = error
        return cause
    if isinstance(error, _DEATHS):
        died = GroupDiedError(f"{process.name} died: {_reason(error)}", process.mpmd_idx)
        died.__cause__ = error
        return died
    return error


def _reason(error: BaseException) -> str:
    """The sentences of Ray's message, without the indented lines that list the actor's identifiers."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return " ".join(lines) or type(error).__name__
