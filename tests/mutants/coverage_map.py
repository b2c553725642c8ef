"""Which tests of ``make test`` run which lines."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from coverage import CoverageData

from tests.mutants.mutants import Mutant

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "build" / "mutants.coverage"
"""The lines of each test, as a database of coverage.py."""


def recorded() -> CoverageData:
    """Reads the record; where it is missing, makes it by a run of the tests, which takes twice as long.

    Tests on Ray are left out: other processes run the lines.
    """
    if not RECORD.exists():
        RECORD.parent.mkdir(exist_ok=True)
        tests = ["-n", "2", "-m", "not slow", "--ignore=tests/ray"]
        lines = ["--cov=mpmd", "--cov=cluster", "--cov-context=test", "--cov-report="]
        command = [sys.executable, "-m", "pytest", *tests, *lines]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "COVERAGE_FILE": str(RECORD)}).returncode
        if code not in (0, 1):  # lines of a test that fails beside a record of lines count all the same
            raise RuntimeError(f"the tests ended with {code}: {' '.join(command)}")
    data = CoverageData(str(RECORD))
    data.read()
    return data


def tests_of(mutant: Mutant, data: CoverageData) -> list[str]:
    """The tests that run the lines of a fault, file by file, nearest to the faulty module first.

    A test of a file whose fixtures run the lines counts, too, because only the first one sets them up.
    """
    text = (ROOT / mutant.file).read_text()
    first = 1 + text[: text.index(mutant.old)].count("\n")
    of_lines = data.contexts_by_lineno(str(ROOT / mutant.file))
    lines = range(first, first + len(mutant.old.splitlines()))
    contexts = {context for line in lines for context in of_lines.get(line, ())}
    set_up = {_file_of(context) for context in contexts if context.endswith("|setup")}
    tests = {
        context.rpartition("|")[0]
        for context in data.measured_contexts()
        if context in contexts or _file_of(context) in set_up
    }
    folders = Path(mutant.file).parts[1:-1]

    def rank(test: str) -> tuple[int, str]:
        pairs = zip(folders, Path(_file_of(test)).parts[1:], strict=False)
        return -len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]), test

    return sorted(tests - {""}, key=rank)


def _file_of(test: str) -> str:
    return test.partition("::")[0]
