"""The exit codes of the command line."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    OK = 0
    FAULT = 1
    """The checked schedule, installation or captured task has a fault."""
    USAGE = 2
    """The command line is wrong, or a file cannot be read or written."""
