"""Shared by all commands: exit codes, adding a command, and types of arguments."""

from __future__ import annotations

import argparse
import enum
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class ExitCode(enum.IntEnum):
    OK = 0
    FAULT = 1
    """The checked schedule, installation or captured task has a fault."""
    USAGE = 2
    """The command line is wrong, or a file cannot be read or written."""


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, epilog: str = ""
) -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=epilog, formatter_class=shape
    )
    parser.set_defaults(run=run)
    return parser


def add_output(parser: argparse.ArgumentParser, suffixes: Sequence[str], text: str, action: str) -> None:
    def path(argument: str) -> Path:
        output = Path(argument)
        if output.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{argument!r} has none of the extensions {', '.join(suffixes)}")
        if output.is_dir() or not output.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{argument!r} is no file in a directory that exists")
        return output

    parser.add_argument("-o", "--output", type=path, action=action, metavar="FILE", help=text)


def count(argument: str) -> int:
    if not argument.isdecimal() or int(argument) < 1:
        raise argparse.ArgumentTypeError(f"{argument!r} is not a whole number of at least 1")
    return int(argument)


def number(argument: str) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e100:
        raise argparse.ArgumentTypeError(f"{argument!r} is not a number from 0 to 1e100")
    return value
