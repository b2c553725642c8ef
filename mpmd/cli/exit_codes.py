"""The exit codes of the command line."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """How a command ended."""

    OK = 0
    BAD_SCHEDULE = 1
    """The schedule of a file cannot run, or the file has none."""
    USAGE = 2
    """The command line is wrong, or a file cannot be read or written."""
