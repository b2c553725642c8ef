"""Translates Ray's errors into the errors of ``mpmd``."""

from __future__ import annotations

import re

from ray import exceptions

from cluster.protocol.endpoint import Endpoint
from mpmd.errors import GroupDiedError

_DEATHS = (
    exceptions.RayActorError,
    exceptions.OutOfMemoryError,  # Ray's memory monitor has killed the process
    exceptions.NodeDiedError,
    exceptions.WorkerCrashedError,
)

_MEMORY = re.compile(r"([\d.]+ ?GB(?: used)? / [\d.]+ ?GB(?: limit)? \([\d.]+\))")

_SUPPOSITIONS = ("Some common causes include", "There are some potential root causes")

_WITHOUT_REASON = (
    "its process has ended, and Ray knows no reason. So ends a process that crashes, or that gets SIGKILL, "
    "as of the kernel when the memory of the node has run out."
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


def is_death(error: BaseException) -> bool:
    """Whether a call has failed because a process is gone."""
    return isinstance(error, (GroupDiedError, *_DEATHS))


def raised_by(error: BaseException) -> BaseException:
    """The error that an actor has raised, without the remote traceback; another error as it is."""
    return error.cause if isinstance(error, exceptions.RayTaskError) else error


def _reason(error: BaseException) -> str:
    """The message of Ray in short: without identifiers, and without the causes that it only supposes."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    text = " ".join(lines).removeprefix("The actor died unexpectedly before finishing this task. ")
    if isinstance(error, exceptions.OutOfMemoryError) or "low on memory" in text:
        memory = _MEMORY.search(text)
        figures = f" ({memory[1]})" if memory else ""
        return f"Ray has killed its process, because the memory of the node ran out{figures}."
    if any(supposition in text for supposition in _SUPPOSITIONS):
        return _WITHOUT_REASON
    return text.split("Worker exit detail: ")[-1] or type(error).__name__
