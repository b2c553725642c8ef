"""The process of one section: ``python -m benchmarks.device.process NAME SETTINGS FILE``."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

from benchmarks.device.sections import SECTIONS
from benchmarks.device.settings import Settings


def main() -> None:
    """Runs the section and writes its findings to the file."""
    name, settings, file = sys.argv[1:]
    section = next(section for section in SECTIONS if section.name == name)
    findings = section.run(Settings(**json.loads(settings)))
    pathlib.Path(file).write_text(json.dumps(dataclasses.asdict(findings)))


if __name__ == "__main__":
    main()
