"""Which tests of ``make test`` run which lines, and how long each test takes."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData

from tests.mutants.mutants import Mutant

ROOT = Path(__file__).parents[2]


def record(coverage: Path, durations: Path) -> None:
    """Runs the tests of ``make test`` that need no Ray, which takes about twice as long as without a record.

    Tests on Ray are left out: other processes run the lines.

    Args:
      coverage: the file that gets the lines of each test, as a database of coverage.py.
      durations: the file that gets the seconds of each test, as JUnit's XML.
    """
    for file in (coverage, durations):
        file.parent.mkdir(parents=True, exist_ok=True)
    tests = ["-n", "2", "-m", "not slow", "--ignore=tests/ray", f"--junitxml={durations.resolve()}"]
    lines = ["--cov=mpmd", "--cov=cluster", "--cov-context=test", "--cov-report="]
    environment = {**os.environ, "COVERAGE_FILE": str(coverage.resolve())}
    command = [sys.executable, "-m", "pytest", *tests, *lines]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if code not in (0, 1):  # lines of a test that fails beside a record of lines count all the same
        raise RuntimeError(f"the tests ended with {code}: {' '.join(command)}")


class CoverageMap:
    """The lines and the seconds of each test, as ``record`` writes them."""

    def __init__(self, coverage: Path, durations: Path):
        self._data = CoverageData(str(coverage))
        self._data.read()
        self._files = {Path(file): file for file in self._data.measured_files()}
        self._tests = {_test_of(context) for context in self._data.measured_contexts()} - {""}
        cases = [case.attrib for case in ElementTree.parse(durations).iter("testcase")]
        self._seconds = {(case["classname"], case["name"]): float(case["time"]) for case in cases}
        self._usual = statistics.median(self._seconds.values())

    def tests(self, mutant: Mutant, seconds: float, least: int = 3) -> list[str]:
        """Tests that run the lines of a fault, as many as fit in ``seconds``, file by file.

        Tests in the folder of the faulty module come first, and of equally near ones the quickest.

        A test of a file whose fixtures run the lines counts, too, because only the first one sets them up.

        Args:
          least: the number of tests that are chosen in any case, if there are so many.
        """
        chosen: list[str] = []
        total = 0.0
        folders = Path(mutant.file).parts[1:-1]

        def rank(test: str) -> tuple[int, float, str]:
            pairs = zip(folders, Path(_file_of(test)).parts[1:], strict=False)
            near = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            return -len(list(near)), self._seconds_of(test), test

        for test in sorted(self._covering(mutant), key=rank):
            total += self._seconds_of(test)
            if total > seconds and len(chosen) >= least:
                break
            chosen.append(test)
        files = dict.fromkeys(map(_file_of, chosen))  # a module's fixtures are set up once
        return [test for file in files for test in chosen if _file_of(test) == file]

    def _covering(self, mutant: Mutant) -> set[str]:
        text = (ROOT / mutant.file).read_text()
        first = 1 + text[: text.index(mutant.old)].count("\n")
        lines = range(first, first + len(mutant.old.splitlines()))
        parts = Path(mutant.file).parts
        measured = next(name for file, name in self._files.items() if file.parts[-len(parts) :] == parts)
        of_lines = self._data.contexts_by_lineno(measured)
        contexts = {context for line in lines for context in of_lines.get(line, ())}
        files = {_file_of(context) for context in contexts if context.endswith("|setup")}
        tests = {_test_of(context) for context in contexts} - {""}
        return tests | {test for test in self._tests if _file_of(test) in files}

    def _seconds_of(self, test: str) -> float:
        path, bracket, parameters = test.partition("[")
        file, *names = path.split("::")
        classname = ".".join([*Path(file).with_suffix("").parts, *names[:-1]])
        return self._seconds.get((classname, names[-1] + bracket + parameters), self._usual)


def _test_of(context: str) -> str:
    """The test of a context, such as ``tests/test_a.py::test_b|run``; empty for what no test runs."""
    return context.rpartition("|")[0]


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def is_recorded(files: Iterable[Path]) -> bool:
    """Whether all files of a record are there."""
    return all(file.exists() for file in files)
