"""Runs all sections on the accelerator of this machine, in ten minutes at most."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Sequence

from benchmarks.device.outcome import Outcome, Section
from benchmarks.device.page import document, file_name, page
from benchmarks.device.running import run_section
from benchmarks.device.sections import SECTIONS
from benchmarks.device.settings import Settings, find
from benchmarks.measure import machine_facts

TOTAL_SECONDS = 580.0
OUTPUT = pathlib.Path("docs/device")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, and 1 when a section failed or has faults."""
    args = parse_arguments(argv)
    settings = find(args.platform, args.quick)
    if settings is None:
        print("no accelerator: JAX finds only CPUs, so nothing was run; --platform cpu runs all on them")
        return 0
    date = datetime.date.today().isoformat()
    outcomes = run_all([each for each in SECTIONS if each.name in args.sections], settings, args.patience)
    results = document(settings, date, machine_facts(), outcomes)
    text = page(results)
    print(text)
    write(args.output, file_name(settings, date), results, text)
    return int(any(outcome.verdict != "ok" for outcome in outcomes))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--platform", help="of JAX; by default that of the accelerator; cpu tries it all out")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes; always so on cpu")
    parser.add_argument("--patience", type=float, default=1.0, help="by which all time limits are multiplied")
    parser.add_argument("--output", type=pathlib.Path, help=f"a folder; by default {OUTPUT}, of CPUs build")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.sections) - set(names)):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(names)}")
    args.sections = args.sections or names
    args.output = args.output or (pathlib.Path("build/device") if args.platform == "cpu" else OUTPUT)
    return args


def run_all(sections: Sequence[Section], settings: Settings, patience: float) -> list[Outcome]:
    """One after the other; the last ones get less time if the others have taken it."""
    end = time.perf_counter() + TOTAL_SECONDS * patience
    outcomes = []
    for section in sections:
        limit = min(section.limit * patience, end - time.perf_counter())
        print(f"{section.title} (at most {limit:.0f} s) ...", file=sys.stderr, flush=True)
        outcomes.append(run_section(section, settings, limit))
        failure = outcomes[-1].failure.partition("\n")[0]
        print(f"  {outcomes[-1].verdict} {failure} {outcomes[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    return outcomes


def write(folder: pathlib.Path, name: str, results: dict, text: str) -> None:
    """Writes the JSON file and the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, content in (("json", json.dumps(results, indent=1) + "\n"), ("md", text)):
        path = folder / f"{name}.{suffix}"
        path.write_text(content)
        print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
