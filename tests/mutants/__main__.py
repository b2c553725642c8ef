"""Plants each fault in a copy of the project, and says which test of ``make test`` notices the fault.

    python -m tests.mutants [NAME ...] [--seconds 120] [--jobs 2]

Of the tests that run the lines of a fault, by a record that is made first where it is missing, those of its
folder come first. They run until one fails; a run that takes longer than the seconds ends, and its fault
counts as not noticed. A test that fails without the fault, too, does not count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.coverage_map import ROOT, recorded, tests_of
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

    def failed(self, tests: Sequence[str], seconds: float) -> str | None:
        """Runs tests in their order, and returns the first that fails; ``None`` after ``seconds``."""
        (self._root / "tests.txt").write_text("\n".join(tests))
        options = ["-x", "--cache-clear", "--hypothesis-seed=0"]
        try:
            code = subprocess.run(
                [sys.executable, "-m", "pytest", *options, "@tests.txt"],
                cwd=self._root,
                env={**os.environ, "PYTHONPATH": str(self._root)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            return None
        if code < 0:
            return f"the process, which ended by signal {-code}"
        last_failed = self._root / ".pytest_cache" / "v" / "cache" / "lastfailed"
        return next(iter(json.loads(last_failed.read_text()))) if code else None


def notice(
    mutant: Mutant, copies: queue.SimpleQueue[Copy], tests: Sequence[str], seconds: float
) -> str | None:
    """The test that notices a fault in a copy, and does not fail in the copy anyway."""
    copy, tests = copies.get(), list(tests)
    try:
        while tests:
            copy.plant(mutant)
            failed = copy.failed(tests, seconds)
            copy.mend(mutant)
            if failed not in tests or copy.failed([failed], seconds) is None:
                return failed
            tests.remove(failed)
        return None
    finally:
        copies.put(copy)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of the names of faults; by default, all")
    parser.add_argument("--seconds", type=float, default=120, help="of tests for each fault")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    args = parser.parse_args()
    mutants = [m for m in MUTANTS if not args.names or m.name.startswith(tuple(args.names))]
    data, noticed = recorded(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ThreadPoolExecutor(args.jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(args.jobs):
            copies.put(Copy(Path(directory, str(job))))

        tests = [tests_of(mutant, data) for mutant in mutants]
        results = pool.map(lambda mutant, own: notice(mutant, copies, own, args.seconds), mutants, tests)
        try:
            for mutant, own, failed in zip(mutants, tests, results, strict=True):
                noticed += failed is not None
                said = f"noticed by {failed}" if failed else "not noticed"
                print(f"{mutant.name:30} {len(own):5} tests  {said}", flush=True)
                print(f"{'':30} {mutant.fault}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or an interrupt, no other fault is planted
    print(f"{noticed} of {len(mutants)} faults are noticed")


if __name__ == "__main__":
    main()
