"""Runs sections, each in a process of its own, one after the other and within a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.device.outcome import Outcome, Section, findings_from_json
from benchmarks.device.settings import Settings

LAST_LINES = 12
MODULE = "benchmarks.device.process"


def run_section(
    section: Section, settings: Settings, limit: float, command: Sequence[str] = ("-m", MODULE)
) -> Outcome:
    """Runs a section in a new process.

    Args:
      limit: the seconds after which the process and all that it has started are killed.
      command: what Python runs; the section's name, the settings and the file of its findings follow.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        file, log = pathlib.Path(directory, "findings.json"), pathlib.Path(directory, "log")
        own_settings = dataclasses.replace(settings, seconds=limit)
        arguments = [section.name, json.dumps(dataclasses.asdict(own_settings)), str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings.environment()},
                start_new_session=True,
            )
            failure = _failure_of(process, limit)
        seconds = time.perf_counter() - start
        if failure:
            lines = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
            return Outcome(section.name, section.title, seconds, None, "\n".join([failure, *lines]))
        return Outcome(section.name, section.title, seconds, findings_from_json(json.loads(file.read_text())))


def _failure_of(process: subprocess.Popen[bytes], limit: float) -> str:
    """Waits for the process, and ends what it leaves. Returns what went wrong, or an empty string."""
    try:
        code = process.wait(max(limit, 0))
    except subprocess.TimeoutExpired:
        return f"not finished within {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}" if code else ""
