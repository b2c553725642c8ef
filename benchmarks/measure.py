"""Times things one after another, again and again, so that a disturbance of the machine hits all alike."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.workload import available_cores

Times = Sequence[float]
"""Seconds, one for each repetition."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """The effort of a measurement.

    Attributes:
      repetitions: how often each thing is measured.
      seconds: how long each measurement is to take: so many steps in a row, two at least.
    """

    repetitions: int
    seconds: float

    def steps(self, seconds_per_step: float) -> int:
        """The steps of one measurement."""
        return min(max(2, round(self.seconds / seconds_per_step)), 1000)


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions under which a suite runs.

    Attributes:
      cores: that everything may use in all.
      ray_address: of the Ray to join.
      peers: the keys of those to measure.
      quick: run the smallest cases alone.
      vtrain: a checkout of vTrain, whose iterations ``published`` reads.
    """

    cores: int
    ray_address: str
    peers: Sequence[str]
    effort: Effort
    quick: bool
    vtrain: pathlib.Path | None = None


def interleaved(things: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, Times]:
    """Measures everything once, then again, each time beginning with another one.

    ``things`` return what they measured.
    """
    measured: dict[str, list[float]] = {name: [] for name in things}
    names = list(things)
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(things[name]())
    return {name: tuple(times) for name, times in measured.items()}


def ratio(these: Times, those: Times) -> float:
    """The ratio of these times to others: the median over repetitions of the ratios within each."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def seconds_of(call: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a heading; prints as Markdown."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = tuple("-" * width if not i else "-" * (width - 1) + ":" for i, width in enumerate(widths))
        text = [_row(line, widths) for line in (self.header, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *text])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(w) for cell, w in others)]) + " |"


@dataclasses.dataclass(frozen=True)
class Target:
    """The bound of a number: at most ``limit``, or at least."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def data(self) -> dict:
        """For JSON."""
        return dataclasses.asdict(self) | {"met": self.met}

    @staticmethod
    def table(targets: Sequence[Target]) -> Table:
        """All targets, and whether each is met."""
        rows = [
            (
                t.what,
                f"{t.value:.2f}",
                f"{'>=' if t.at_least else '<='} {t.limit:g}",
                "yes" if t.met else "no",
            )
            for t in targets
        ]
        return Table("Targets", ("", "measured", "target", "met"), tuple(rows))


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a suite: tables and targets for people, ``data`` for programs (plain JSON values)."""

    tables: Sequence[Table]
    targets: Sequence[Target]
    data: object

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables))


def machine_facts() -> dict[str, str]:
    """The facts that the numbers depend on: the machine, its load, and the versions."""
    packages = ("jax", "jaxlib", "ray", "numpy", "optax", "torch")
    installed = [name for name in packages if importlib.util.find_spec(name)]
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return {
        "time": time.strftime("%Y-%m-%d %H:%M %Z"),
        "processor": _processor(),
        "cores": str(available_cores()),
        "memory": _memory(),
        "load before": load,
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in installed},
    }


def _processor() -> str:
    information = pathlib.Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return "unknown"
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
