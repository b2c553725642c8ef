"""The command ``mpmd top``: it shows the runs that other terminals have started."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from mpmd.cli.arguments import add_command, number
from mpmd.cli.exit_codes import ExitCode
from mpmd.util.tables import human_bytes, table
from mpmd.watching.run_record import FunctionRecord, ProcessRecord, RunRecord

# -P: a package `cluster` in the current directory is not ours.
READER = (sys.executable, "-P", "-m", "cluster.watching.reader")
"""The program that looks at a cluster, and writes a line of JSON for each look."""

_LEAST_INTERVAL = 0.5
_LONGEST_PHRASE = 100
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?1049l\x1b[?25h"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"

_OF_FUNCTIONS = ("function", "steps", "failed", "under way", "s/step", "steps/s", "last ended")
_OF_PROCESSES = ("group", "process", "node", "pid", "memory", "device memory", "pending", "state")

EPILOG = """\
It shows the runs of `mpmd.launch` on the Ray clusters of this machine, or on the one at --address: their
functions with the steps that have ended, the rate and what is under way; what each process is doing, its
memory, and the recoveries. It goes through Ray alone, with Ray's token where the cluster has one, and the run
does not wait for it. Groups within one process (mpmd.MpmdMesh) cannot be reached from another terminal: there
print(mesh.status()) shows them.

The exit code is 1 where there is no run. With --json, each look at the runs is a line.

examples:
  mpmd top
  mpmd top --once
  mpmd top --json --once | python -m json.tool
  mpmd top --address 10.0.0.1:6379 --interval 10
"""


@dataclasses.dataclass(frozen=True)
class Look:
    """The runs of all clusters at one moment.

    Attributes:
      addresses: of the clusters.
      runs: each with whether its driver has answered; the record of another one is old.
      unreadable: why there are records that cannot be read.
    """

    addresses: tuple[str, ...]
    runs: tuple[tuple[RunRecord, bool], ...]
    unreadable: tuple[str, ...]

    @staticmethod
    def of(line: str) -> Look:
        """The look that a line of the reader says."""
        clusters = json.loads(line)["clusters"]
        return Look(
            tuple(cluster["address"] for cluster in clusters),
            tuple(
                (RunRecord.from_json(json.dumps(run["record"])), bool(run["answered"]))
                for cluster in clusters
                for run in cluster["runs"]
            ),
            tuple(text for cluster in clusters for text in cluster["unreadable"]),
        )

    def as_json(self) -> str:
        """The look as one line, the same that it was."""
        return json.dumps(
            {
                "clusters": list(self.addresses),
                "runs": [{"answered": answered, **json.loads(run.to_json())} for run, answered in self.runs],
            }
        )

    def __str__(self) -> str:
        texts = [run_text(run, answered) for run, answered in self.runs]
        if not texts and self.addresses:
            texts = [f"there is no run on the Ray cluster at {', '.join(self.addresses)}"]
        elif not texts:
            other = "no Ray cluster of this user has a node on this machine; --address names another one"
            texts = [f"there is no run: {other}"]
        return "\n\n".join([*texts, *self.unreadable])


def add_commands(commands: Any) -> None:
    """Adds ``mpmd top``."""
    parser = add_command(commands, "top", _top, "show the runs that other terminals have started", EPILOG)
    parser.add_argument("--once", action="store_true", help="print one table, and end")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--address", help="the Ray cluster to look at; by default those of this machine")
    help_text = f"seconds between two looks, at least {_LEAST_INTERVAL:g} (default: 2)"
    parser.add_argument("--interval", type=number, default=2.0, metavar="S", help=help_text)


def _top(options: argparse.Namespace) -> int:
    if options.interval < _LEAST_INTERVAL:
        raise ValueError(f"--interval must be at least {_LEAST_INTERVAL:g} seconds, not {options.interval:g}")
    in_place = sys.stdout.isatty() and not options.once and not options.json
    last = None
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        looks = stack.enter_context(_looking(options))
        for look in looks:
            if not look.runs:
                last = look if last is None else last
                break
            if in_place and last is None:
                stack.callback(_write, _FIRST_SCREEN)
                _write(_OTHER_SCREEN)
            last = look
            _write(_page(look) if in_place else f"{look.as_json() if options.json else look}\n")
    if last is None or last.runs:
        return ExitCode.OK
    _write(f"{last.as_json() if options.json else last}\n")
    return ExitCode.FAULT


@contextlib.contextmanager
def _looking(options: argparse.Namespace) -> Iterator[Iterator[Look]]:
    """A context with the looks at the runs, one after the other, until the reader ends."""
    command = [*READER, "--interval", str(options.interval)]
    command += ["--once"] if options.once else []
    command += ["--address", options.address] if options.address else []
    with (
        tempfile.TemporaryFile("w+") as messages,
        # In a session of its own, an interrupt of this process does not reach it.
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=messages, text=True, start_new_session=True
        ) as reader,
    ):
        try:
            yield _looks(reader, messages)
        finally:
            reader.terminate()


def _looks(reader: subprocess.Popen[str], messages: IO[str]) -> Iterator[Look]:
    """Raises ``ValueError`` with the last message of a reader that fails."""
    assert reader.stdout is not None, "it is a pipe"
    for line in reader.stdout:
        yield Look.of(line)
    if reader.wait():
        messages.seek(0)
        lines = messages.read().strip().splitlines() or [f"the reader ended with {reader.returncode}"]
        raise ValueError(lines[-1])


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _page(look: Look) -> str:
    """The look in place of the one before, as much of it as the terminal has room for."""
    columns, rows = shutil.get_terminal_size()
    lines = [f"mpmd top at {time.strftime('%H:%M:%S')}; Ctrl-C ends it", "", *str(look).splitlines()]
    if len(lines) > rows - 1:
        lines[rows - 2 :] = [f"... {len(lines) - rows + 2} more lines: mpmd top --once | less"]
    return _HOME + "".join(f"{line[:columns]}{_END_OF_LINE}\n" for line in lines) + _BELOW


def run_text(run: RunRecord, answered: bool) -> str:
    """A run as tables."""
    since = _duration(max(0.0, time.time() - run.launched))
    lines = [f"{run.program}, process {run.pid} on {run.node}, on {run.platform}, launched {since} ago"]
    if not answered:
        lines.append("its driver does not answer: it is stopped, or was killed; this is the last it has said")
    if run.recoveries:
        seconds = f"{run.recovery_seconds:.1f} s in all"
        lines.append(
            f"recoveries: {run.recoveries}, {seconds}; the last: {_shortened(run.last_recovery or '')}"
        )
    functions = [
        function for function in run.functions if function.ended or function.failed or function.under_way
    ]
    if functions:
        lines += ["", table(_OF_FUNCTIONS, list(map(_function_row, functions)))]
    lines += ["", table(_OF_PROCESSES, list(map(_process_row, run.processes)))]
    return "\n".join(lines)


def _function_row(function: FunctionRecord) -> tuple[str, ...]:
    seconds, since = function.seconds_per_step, function.seconds_since_end
    counts = (function.ended, function.failed, function.under_way)
    return (
        function.name,
        *map(str, counts),
        "-" if seconds is None else f"{seconds:.3g}",
        "-" if not seconds else f"{1 / seconds:.3g}",
        "-" if since is None else f"{_duration(since)} ago",
    )


def _process_row(process: ProcessRecord) -> tuple[str, ...]:
    shared = "" if process.shares_with is None else f", shared with group {process.shares_with}"
    memory = (process.host_bytes, process.device_bytes)
    return (
        str(process.mpmd_idx),
        str(process.rank),
        f"{process.node}{shared}",
        str(process.pid),
        *("-" if count is None else human_bytes(count) for count in memory),
        "-" if process.pending is None else str(process.pending),
        "-" if process.state is None else _shortened(process.state),
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_PHRASE else f"{text[: _LONGEST_PHRASE - 1]}…"


def _duration(seconds: float) -> str:
    """Seconds as text, in the unit that fits."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"
