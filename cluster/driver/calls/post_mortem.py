"""Explains the death of a process: the reason that Ray knows, where the process ran, how its log ends."""

from __future__ import annotations

import os
import re

from ray import exceptions

from cluster.protocol.endpoint import Endpoint
from cluster.protocol.process_info import ProcessInfo
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

_LINES = 8
_BYTES = 16 * 1024
_LINE_LENGTH = 200

_SIGNAL = re.compile(r"\*\*\* (SIG\w+) received")


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


def raised_by(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, exceptions.RayTaskError) else error


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    text = " ".join(lines).removeprefix("The actor died unexpectedly before finishing this task. ")
    if isinstance(error, exceptions.OutOfMemoryError) or "low on memory" in text:
        memory = _MEMORY.search(text)
        figures = f" ({memory[1]})" if memory else ""
        return f"Ray has killed its process, because the memory of the node ran out{figures}."
    if any(supposition in text for supposition in _SUPPOSITIONS):
        return _WITHOUT_REASON
    return text.split("Worker exit detail: ")[-1] or type(error).__name__


def location_of(info: ProcessInfo) -> str:
    return f"node {info.node}, pid {info.pid}"


def death_report(info: ProcessInfo, node_id: str) -> str:
    """The node of a process that has died, its signal if its log has it, and the end of its log.

    Args:
      node_id: this process's node, whose logs it can read.
    """
    where = f"It ran at {location_of(info)}"
    if not info.log:
        return f"{where}."
    if info.node_id != node_id:
        return f"{where}; its log there is {info.log}"
    lines = _end_of(info.log)
    if not lines:
        return f"{where}; its log, {info.log}, is empty."
    signals = [match[1] for line in lines if (match := _SIGNAL.search(line))]
    ended = f", and was ended by {signals[-1]}" if signals else ""
    shown = "\n".join(f"  {line[:_LINE_LENGTH]}" for line in lines[-_LINES:])
    return f"{where}{ended}. The last lines of its log, {info.log}:\n{shown}"


def _end_of(path: str) -> list[str]:
    try:
        with open(path, "rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _BYTES, 0))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return [
        line for line in text.splitlines() if line.strip() and not line.startswith((":job_id:", ":actor_"))
    ]
