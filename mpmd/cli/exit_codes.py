"""The exit codes of the command line."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """The exit codes of commands."""

    OK = 0
    FAULT = 1
    """The schedule or the installation that was checked has a fault."""
    USAGE = 2
    """The command line is wrong, or a file cannot be read or written."""
