"""Plants each fault in a copy of the project, and says which test of ``make test`` notices the fault.

    python -m tests.mutants [NAME ...] [--seconds 60] [--jobs 2] [--coverage FILE] [--durations FILE]

Of the tests that run the lines of a fault, those of its folder come first, and of these the quickest. They
run until one fails, as many as fit in the seconds by their durations in the record, which is made first
where it is missing. A run that takes much longer ends, and its fault counts as not noticed. A test that
fails without the fault, too, does not count.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutants.coverage_map import ROOT, CoverageMap, is_recorded, record
from tests.mutants.mutants import MUTANTS, Mutant

_LEFT_OUT = (
    ".git",
    ".venv",
    ".nox",
    "build",
    "dist",
    "demo_output",
    ".hypothesis",
    ".*_cache",
    "__pycache__",
)

_OVERTIME = 3
"""The times of its seconds that a run may take, where other work slows it down, with a minute to start in."""


class Outcome(NamedTuple):
    """The outcome of the tests on a copy of the project.

    Attributes:
      failed: the test that has failed; ``None`` if all have passed.
      text: the reason, where no test has said so.
    """

    failed: str | None
    text: str = ""


class Copy:
    """A copy of the project in a directory, in which faults are planted one after the other."""

    def __init__(self, directory: Path):
        self._root = directory
        shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(*_LEFT_OUT), dirs_exist_ok=True)

    def plant(self, mutant: Mutant) -> None:
        self._write(mutant, (ROOT / mutant.file).read_text().replace(mutant.old, mutant.new))

    def mend(self, mutant: Mutant) -> None:
        self._write(mutant, (ROOT / mutant.file).read_text())
        shutil.rmtree(self._root / ".hypothesis", ignore_errors=True)  # examples found by other faults

    def _write(self, mutant: Mutant, text: str) -> None:
        path = self._root / mutant.file
        path.write_text(text)
        # Python tells files of equal size apart by the second in which they were written.
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)

    def run(self, tests: Sequence[str], seconds: float) -> Outcome:
        """Runs tests in their order until one fails."""
        (self._root / "tests.txt").write_text("\n".join(tests))
        options = ["-x", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        output = self._root / "output.txt"
        try:
            with output.open("w") as file:  # a pipe would stay open in processes that tests have started
                code = subprocess.run(
                    [sys.executable, "-m", "pytest", *options, "@tests.txt"],
                    cwd=self._root,
                    env={**os.environ, "PYTHONPATH": str(self._root)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=_OVERTIME * seconds + 60,
                ).returncode
        except subprocess.TimeoutExpired:
            return Outcome(None, "time")
        if code == 0:
            return Outcome(None)
        if code < 0:
            return Outcome(f"the process, which ended by signal {-code}")
        summary = output.read_text().rpartition("short test summary info")[2].splitlines()
        failed = [test for test in tests if any(test in _says(line) for line in summary)]
        if not failed:
            raise RuntimeError(f"pytest ended with {code}, and no test has failed:\n{output.read_text()}")
        return Outcome(failed[0])


def _says(line: str) -> tuple[str, ...]:
    """The tests that a line of the summary may be about, which are followed by a dash and a message."""
    _, _, text = line.partition(" ")
    return text, *(text[:i] for i in range(len(text)) if text.startswith(" - ", i))


def notice(mutant: Mutant, copies: queue.SimpleQueue[Copy], tests: Sequence[str], seconds: float) -> Outcome:
    """The outcome of tests on a copy with a fault, without those that fail in the copy anyway."""
    copy, tests = copies.get(), list(tests)
    try:
        while tests:
            copy.plant(mutant)
            outcome = copy.run(tests, seconds)
            copy.mend(mutant)
            if outcome.failed not in tests or copy.run([outcome.failed], seconds).failed is None:
                return outcome
            tests.remove(outcome.failed)
        return Outcome(None, "no test runs it")
    finally:
        copies.put(copy)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of the names of faults; by default, all")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each fault")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--coverage", type=Path, default=ROOT / "build/mutants.coverage")
    parser.add_argument("--durations", type=Path, default=ROOT / "build/mutants.xml")
    args = parser.parse_args()
    mutants = [m for m in MUTANTS if not args.names or m.name.startswith(tuple(args.names))]
    if not is_recorded((args.coverage, args.durations)):
        record(args.coverage, args.durations)
    covered = CoverageMap(args.coverage, args.durations)
    noticed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ThreadPoolExecutor(args.jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(args.jobs):
            copies.put(Copy(Path(directory, str(job))))

        def result(mutant: Mutant) -> tuple[Outcome, int, float]:
            tests, begun = covered.tests(mutant, args.seconds), time.monotonic()
            outcome = notice(mutant, copies, tests, args.seconds)
            return outcome, len(tests), time.monotonic() - begun

        try:
            for mutant, (outcome, number, seconds) in zip(mutants, pool.map(result, mutants), strict=True):
                noticed += outcome.failed is not None
                said = f"noticed by {outcome.failed}" if outcome.failed else f"not noticed  {outcome.text}"
                print(f"{mutant.name:30} {number:5} tests {seconds:4.0f} s  {said}", flush=True)
                print(f"{'':30} {mutant.fault}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or an interrupt, no other fault is planted
    print(f"{noticed} of {len(mutants)} faults are noticed")


if __name__ == "__main__":
    main()
