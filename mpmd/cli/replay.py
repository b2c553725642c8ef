"""The command ``mpmd replay``: one captured task again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpmd.cli.arguments import ExitCode, add_command
from mpmd.replay.environment import prepare
from mpmd.replay.record import read_task
from mpmd.util.guarded_files import naming, parse_json, read_bytes

EPILOG = """\
A directory is what step.capture(..., to="DIR") writes, or a mesh with
capture="DIR" for a task that fails. The command needs JAX and numpy
alone. It prints the first equation of the task that had made a NaN or
an infinity, runs the executable, and compares the bits of its results
with the recorded ones.

It sets NPROC and XLA_FLAGS as they were on the group, and as many
devices, before it imports JAX.

examples:
  mpmd replay captured/fwd_2__0
  mpmd replay captured/fwd_2__0 --digests here.json   on one machine
  mpmd replay captured/fwd_2__0 --against here.json   on another one
"""


def add_commands(commands: Any) -> None:
    replay = add_command(commands, "replay", _replay, "run one captured task again, alone", EPILOG)
    replay.add_argument("directory", type=Path, metavar="DIR", help="the directory of a captured task")
    replay.add_argument("--digests", type=Path, metavar="FILE", help="write a digest of each result")
    replay.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with the digests of another machine"
    )
    replay.add_argument("--json", action="store_true", help="print JSON")


def _replay(options: argparse.Namespace) -> int:
    prepare(read_task(options.directory))
    from mpmd.replay.captured_task import load  # which imports JAX
    from mpmd.replay.report import as_json, replay, text

    task = load(options.directory)
    result = replay(task, None if options.against is None else _digests(options.against))
    if options.digests is not None:
        options.digests.write_text(json.dumps(result.digests()))
    print(json.dumps(as_json(result), indent=1) if options.json else text(result))
    return ExitCode.FAULT if result.has_fault else ExitCode.OK


def _digests(path: Path) -> Mapping[str, str]:
    with naming(path):
        digests = parse_json(read_bytes(path))
    if not isinstance(digests, dict) or not digests or {str} != set(map(type, digests.values())):
        raise ValueError(f"{path} has no digests of `mpmd replay DIR --digests {path}`")
    return digests
