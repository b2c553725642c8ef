"""The page of text and the JSON document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.device.outcome import Outcome
from benchmarks.device.settings import Settings
from benchmarks.measure import Table


def file_name(settings: Settings, date: str) -> str:
    """The name of both files, without a suffix: the kind of device, how many, and the date."""
    kind = re.sub(r"[^a-z0-9]+", "-", settings.kind.lower()).strip("-")
    return f"{kind}-x{settings.devices}-{date}"


def document(
    settings: Settings, date: str, machine: Mapping[str, str], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """All results as plain JSON values."""
    return {
        "device": settings.kind,
        "platform": settings.platform,
        "devices": settings.devices,
        "date": date,
        "quick": settings.quick,
        "machine": dict(machine),
        "sections": [outcome.as_json() for outcome in outcomes],
    }


def page(document: Mapping[str, Any]) -> str:
    """The document as Markdown: which sections work, and then the tables of each."""
    outcomes = [Outcome.from_json(values) for values in document["sections"]]
    lines = [f"# {document['devices']} x {document['device']} ({document['platform']}), {document['date']}"]
    if document["quick"]:
        lines.append("The smallest sizes: what works, not how fast.")
    rows = tuple((outcome.title, outcome.verdict, f"{outcome.seconds:.0f}") for outcome in outcomes)
    lines.append(str(Table("Sections", ("section", "", "s"), rows)))
    for outcome in outcomes:
        lines.append(f"## {outcome.title}")
        if outcome.findings:
            if outcome.findings.faults:
                lines.append("\n".join(f"- fault: {fault}" for fault in outcome.findings.faults))
            lines += map(str, outcome.findings.tables)
        else:
            first, *rest = outcome.failure.splitlines()
            lines.append("\n".join([f"failed: {first}", *(["", "```", *rest, "```"] if rest else [])]))
    lines.append(str(Table("Machine", ("", "value"), tuple(document["machine"].items()))))
    return "\n\n".join(lines) + "\n"
