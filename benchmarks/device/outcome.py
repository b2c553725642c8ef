"""The result of a section, and how it is written and read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.device.settings import Settings
from benchmarks.measure import Table


@dataclasses.dataclass(frozen=True)
class Findings:
    """The measurements of a section.

    Attributes:
      tables: for people.
      data: for programs, plain JSON values.
      faults: what is not as it has to be.
    """

    tables: tuple[Table, ...]
    data: Any
    faults: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Section:
    """A section.

    Attributes:
      name: what options and files call it.
      title: what the page calls it.
      limit: the seconds after which it is ended.
      run: measures.
    """

    name: str
    title: str
    limit: float
    run: Callable[[Settings], Findings]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a section: well, failed, or left out.

    Attributes:
      seconds: that it took.
      findings: ``None`` when it failed.
      failure: why, and the last lines that it wrote.
    """

    name: str
    title: str
    seconds: float
    findings: Findings | None
    failure: str = ""

    @property
    def verdict(self) -> str:
        """``ok``, ``failed``, or how many faults there are."""
        if self.findings is None:
            return "failed"
        faults = len(self.findings.faults)
        return "ok" if not faults else "1 fault" if faults == 1 else f"{faults} faults"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Outcome:
        """The outcome of ``as_json``'s values."""
        findings = values["findings"]
        return Outcome(**{**values, "findings": findings and findings_from_json(findings)})


def findings_from_json(values: Mapping[str, Any]) -> Findings:
    """The findings of which ``dataclasses.asdict`` has made these values."""
    tables = (
        Table(table["title"], tuple(table["header"]), tuple(map(tuple, table["rows"])))
        for table in values["tables"]
    )
    return Findings(tuple(tables), values["data"], tuple(values["faults"]))
