"""The traces of a process that has died: where it ran, and the end of its log."""

from __future__ import annotations

import os
import re

from cluster.protocol.process_info import ProcessInfo

_LINES = 8
_BYTES = 16 * 1024
_LINE_LENGTH = 200

_SIGNAL = re.compile(r"\*\*\* (SIG\w+) received")


def location_of(info: ProcessInfo) -> str:
    """The node and number of a process, for messages to users."""
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
    """The last lines of a log, without Ray's own markers; none when the log cannot be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _BYTES, 0))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return [
        line for line in text.splitlines() if line.strip() and not line.startswith((":job_id:", ":actor_"))
    ]
