"""The command ``mpmd report``: the page of a measured step, or of two with what changed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from mpmd.cli.arguments import ExitCode, add_command, add_output
from mpmd.profile.profile import Profile
from mpmd.util.printable import printable

EPILOG = """\
A profile is what step.profile(...).save("step.json") writes. The page
is one file for a browser, which loads nothing: why groups waited, by
cause, above a simulated step; memory, tasks and messages.

examples:
  mpmd report step.json                              writes step.html
  mpmd report step.json -o page.html --title "four groups"
  mpmd report before.json after.json -o change.html  the changes, too
"""


def add_commands(commands: Any) -> None:
    report = add_command(commands, "report", _report, "make a page of a measured step, or of two", EPILOG)
    report.add_argument("profile", type=Path, metavar="FILE", help="a profile")
    report.add_argument(
        "after", type=Path, nargs="?", metavar="AFTER", help="a later profile, to compare with the first"
    )
    report.add_argument(
        "--title", help="the heading of the page (default: the schedule and its size, or the files' names)"
    )
    add_output(
        report, (".html",), "the page (default: beside the last profile, as a new .html file)", action="store"
    )


def _report(options: argparse.Namespace) -> int:
    profiles = [Profile.load(path) for path in (options.profile, options.after) if path]
    output = options.output or _default_output(options.after or options.profile)
    if options.after:
        first, last = profiles
        files = f"{options.profile.stem} and {options.after.stem}"
        last.write_html(output, title=options.title or files, before=first)
    else:
        profiles[0].write_html(output, title=options.title)
    print(printable(output))
    return ExitCode.OK


def _default_output(profile: Path) -> Path:
    output = profile.with_suffix(".html")
    if os.path.lexists(output):  # a dangling link, too, through which the page would be written
        raise ValueError(f"{output} exists: name the page with -o, which may also replace that file")
    return output
