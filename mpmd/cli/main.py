"""The command line ``mpmd``: the parser, and the exit codes of failures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mpmd.cli import doctor, plan, replay, report, schedule
from mpmd.cli.arguments import ExitCode
from mpmd.util.printable import printable
from mpmd.validation import cut
from mpmd.version import __version__

_WITHOUT_TOP = (
    "there is no `mpmd top` any more: in the program, print(mesh.status()) shows what each process is doing, "
    "and Ray's dashboard and Prometheus have ray_mpmd_steps_total and the other numbers of docs/watching.md"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0 if all is well, 1 where a check finds a fault, and 2 for wrong usage.

    ``ExitCode`` has all that they stand for.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    if arguments[:1] == ["top"]:
        parser.error(_WITHOUT_TOP)
    options = parser.parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except schedule.BadSchedule as error:
        print(error, file=sys.stderr)
        return ExitCode.FAULT
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except (ValueError, OSError, ImportError, MemoryError) as error:
        text = "\n".join(map(printable, _text_of(error).split("\n")))  # which may name files of others
        print(f"mpmd: error: {cut(text)}", file=sys.stderr)
        return ExitCode.USAGE


def _text_of(error: Exception) -> str:
    """Returns the text of an error, without the number that the system has for it."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpmd", description="Tools for pipeline-parallel training in JAX.")
    parser.add_argument("--version", action="version", version=f"mpmd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    schedule.add_commands(commands)
    plan.add_commands(commands)
    report.add_commands(commands)
    replay.add_commands(commands)
    doctor.add_commands(commands)
    return parser
