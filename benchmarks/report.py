"""The output of benchmarks: tables of Markdown for people, one JSON document for programs."""

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
from collections.abc import Mapping, Sequence

from benchmarks.frame import Cell, Limited, Row, Setup


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a benchmark.

    Attributes:
      tables: the rows of each table, by its title.
      failure: why it stopped early; empty if all cases were measured and nothing was wrong.
    """

    name: str
    seconds: float
    tables: Mapping[str, Sequence[Row]]
    failure: str = ""

    def __str__(self) -> str:
        tables = [table(title, rows) for title, rows in self.tables.items()]
        return "\n\n".join([*tables, *([f"failed: {self.failure}"] if self.failure else [])])

    def missed(self) -> list[Row]:
        """A row for each value beyond its limit."""
        return [
            {"benchmark": self.name, "row": _first_cells(row), "column": column, "value": value}
            for rows in self.tables.values()
            for row in rows
            for column, value in row.items()
            if isinstance(value, Limited) and not value.kept
        ]


def _first_cells(row: Row) -> str:
    return ", ".join(value for value in row.values() if isinstance(value, str))


def table(title: str, rows: Sequence[Row]) -> str:
    """A Markdown table; a row may lack columns of other rows."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, *([text_of(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    is_text = [all(isinstance(row.get(column, ""), str) for row in rows) for column in columns]
    rule = ["-" * (width - 1) + ("-" if text else ":") for width, text in zip(widths, is_text, strict=True)]
    lines.insert(1, rule)
    padded = (
        [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(cells, widths, is_text, strict=True)
        ]
        for cells in lines
    )
    return "\n".join([f"**{title}**", "", *(f"| {' | '.join(cells)} |" for cells in padded)])


def text_of(cell: Cell) -> str:
    """The text of a cell: of repetitions the median, three digits, and the limit of a value beyond it."""
    match cell:
        case str():
            return " ".join(cell.split()).replace("|", "/")
        case Limited():
            sign = "<" if cell.at_least else ">"
            return text_of(cell.value) + ("" if cell.kept else f" {sign} {cell.limit:g}")
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return text_of(statistics.median(cell))


def page(setup: Setup, machine: Row, outcomes: Sequence[Outcome]) -> str:
    """All results as a page of Markdown."""
    lines = [f"# {setup.devices} x {setup.kind} ({setup.platform}), {time.strftime('%Y-%m-%d')}"]
    if setup.quick:
        lines.append("The smallest sizes: they show that everything works, not how fast.")
    verdicts = [
        {"benchmark": each.name, "": "failed" if each.failure else "ok", "s": each.seconds}
        for each in outcomes
    ]
    lines.append(table("Benchmarks", verdicts))
    lines += [f"## {each.name}\n\n{each}" for each in outcomes]
    return "\n\n".join([*lines, machine_table(machine)]) + "\n"


def machine_table(machine: Row) -> str:
    return table("Machine", [{"": name, "value": value} for name, value in machine.items()])


def document(setup: Setup, machine: Row, outcomes: Sequence[Outcome]) -> dict:
    """All results as plain JSON values; a cell with a limit is an object."""
    return {
        "machine": machine,
        "device": {"platform": setup.platform, "kind": setup.kind, "devices": setup.devices},
        "quick": setup.quick,
        "benchmarks": {each.name: dataclasses.asdict(each) for each in outcomes},
    }


def machine_facts() -> dict[str, str]:
    """The machine, its load, and the versions of packages."""
    packages = ("jax", "jaxlib", "ray", "numpy", "optax", "torch")
    installed = [name for name in packages if importlib.util.find_spec(name)]
    return {
        "time": time.strftime("%Y-%m-%d %H:%M %Z"),
        "processor": _processor(),
        "cores": str(available_cores()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in installed},
    }


def _processor() -> str:
    information = pathlib.Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
