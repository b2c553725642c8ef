"""The commands ``mpmd schedule``: show, compare, check and list schedules."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpmd.cli.arguments import ExitCode, add_command, add_output, count, number
from mpmd.ir.plan import TaskKind
from mpmd.render import chrome_trace, draw_comparison, draw_timeline, schedule_grid
from mpmd.render.chart import Chart
from mpmd.render.summary import group_table
from mpmd.schedules import ALL_FAMILIES, CustomSchedule, Schedule, TaskLists, build, to_text
from mpmd.simulate import Costs, Link, Simulation, simulate
from mpmd.simulate.compare import Comparison, SimulatedSchedule, compare, with_costs
from mpmd.util.printable import printable
from mpmd.util.tables import aligned

PICTURES = (".svg", ".png", ".pdf")
GRID_LINES = 200
"""The most lines of a grid that a terminal gets."""

SHOW = """\
examples:
  mpmd schedule show Std1F1B --groups 4 --microbatches 8
  mpmd schedule show Interleaved1F1B --stages 8 -o s.svg -o s.json
  mpmd schedule show ZeroBubble --groups 8 --bwd-w 0.8 --latency 0.1
  mpmd schedule show Seq1F1B --groups 4 --slices 4 --microbatches 2
  mpmd schedule show mine.csv
"""

COMPARE = """\
Times are those of all stages of a group together. Memory is in
residuals of a microbatch of all stages of a group. The period is the
time from step to step if nothing makes the groups wait for one another
in between.

examples:
  mpmd schedule compare --groups 8 --microbatches 32
  mpmd schedule compare --groups 8 --microbatches 32 -o page.svg
  mpmd schedule compare --groups 8 --microbatches 32 --memory-limit 8
  mpmd schedule compare --groups 8 --microbatches 8 --slices 8
"""

CHECK = """\
A file has one row of tasks per group; between tasks are white space,
"|" or ",". Tasks are written as F0 (the forward of microbatch 0), B0
(its backward), A0 and W0 (its gradients of inputs and of weights), with
the stage before the letter where it is not the group's number (5F0);
F0+B0 is one fused task, and "." is idle. If microbatches are cut into
slices, the slice comes last (F0s3).

examples:
  mpmd schedule check mine.csv
  mpmd schedule show Std1F1B -o mine.txt; mpmd schedule check mine.txt
"""


class BadSchedule(Exception):
    """The schedule of a file cannot run, or the file has none."""


def add_commands(commands: Any) -> None:
    schedule = commands.add_parser("schedule", help="show, compare, check and list schedules")
    verbs = schedule.add_subparsers(required=True, metavar="VERB")

    show = add_command(verbs, "show", _show, "print and draw a schedule of a family or of a file", SHOW)
    show.add_argument("schedule", help="a family (see 'mpmd schedule list') or a file")
    show.add_argument("--groups", type=count, metavar="P", help="groups of devices (default: 4)")
    show.add_argument("--stages", type=count, metavar="S", help="stages (default: what the family has)")
    show.add_argument("--microbatches", type=count, metavar="M", help="microbatches (default: 2 per group)")
    show.add_argument("--slices", type=count, metavar="K", help="slices of each microbatch (default: 1)")
    _add_times(show, "of a stage")
    formats = "a picture (.svg, .png, .pdf), a trace for Perfetto (.json), or the lists (.csv, .txt)"
    add_output(show, (*PICTURES, ".json", ".csv", ".txt"), f"{formats}; can be repeated", action="append")

    comparison = add_command(verbs, "compare", _compare, "rank all families by the time of a step", COMPARE)
    comparison.add_argument("--groups", type=count, required=True, metavar="P", help="groups of devices")
    comparison.add_argument("--microbatches", type=count, required=True, metavar="M", help="microbatches")
    stages = "numbers to try (default: each family's own)"
    comparison.add_argument("--stages-per-group", type=count, nargs="+", default=[], metavar="V", help=stages)
    slices = "slices of equal work, for the schedules that cut microbatches (default: none of these)"
    comparison.add_argument("--slices", type=count, default=1, metavar="K", help=slices)
    limit = "memory of a group (default: no limit)"
    comparison.add_argument("--memory-limit", type=number, default=math.inf, metavar="N", help=limit)
    _add_times(comparison, "of all stages of a group")
    add_output(comparison, PICTURES, "a page with all schedules (.svg, .png, .pdf)", action="store")

    check = add_command(verbs, "check", _check, "check schedules in files", CHECK)
    check.add_argument("files", nargs="+", metavar="FILE", help="a file with a schedule")

    add_command(verbs, "list", _list, "list the families of schedules")


def _add_times(parser: argparse.ArgumentParser, of: str) -> None:
    times = parser.add_argument_group(f"times of tasks {of} for a microbatch, in any unit")
    for option, default, text in (
        ("--fwd", 1.0, "a forward"),
        ("--bwd", 2.0, "a whole backward"),
        ("--bwd-a", 1.0, "the part of a split backward that makes the gradients of inputs"),
        ("--bwd-w", 1.0, "the part of a split backward that makes the gradients of weights"),
        ("--latency", 0.0, "a message from group to group"),
    ):
        help_text = f"{text} (default: {default:g})"
        times.add_argument(option, type=number, default=default, metavar="T", help=help_text)


def _show(options: argparse.Namespace) -> int:
    schedule, name, num_microbatches = _chosen(options)
    slices = schedule.slices
    times = {kind: time / slices for kind, time in _times(options).items()}
    costs = Costs(times, link=Link(options.latency), atomic=True)
    tasks = with_costs(schedule, costs).tasks(num_microbatches)
    simulation = simulate(tasks, costs, slices=slices)
    chart = Chart.of(simulation, slices=slices)
    print(f"{name}: {chart.size}\n\n{_fitted(schedule_grid(tasks, costs, slices))}\n")
    print(f"{chart.figures}, period {simulate(tasks, costs, steps=2, slices=slices).period:.5g}\n")
    print(group_table(simulation, slices))
    for path in options.output or []:
        _write(path, tasks, simulation, name, slices)
    return ExitCode.OK


def _chosen(options: argparse.Namespace) -> tuple[Schedule, str, int]:
    sizes = (options.groups, options.stages, options.microbatches, options.slices)
    if options.schedule.lower() in map(str.lower, ALL_FAMILIES):
        groups, stages, microbatches, slices = sizes
        groups = 4 if groups is None and stages is None else groups
        schedule = build(options.schedule, groups, stages, slices or 1)
        return schedule, schedule.name, microbatches or 2 * schedule.mpmd_dim
    if not Path(options.schedule).is_file():
        known = ", ".join(ALL_FAMILIES)
        raise ValueError(f"{options.schedule!r} is no file, and no family of schedules; these are {known}")
    if any(sizes):
        raise ValueError("a file has its own size: leave out --groups, --stages, --microbatches and --slices")
    custom = _read(options.schedule)
    return custom, printable(Path(options.schedule).name), custom.num_microbatches


def _read(path: str) -> CustomSchedule:
    try:
        return CustomSchedule.from_file(path)
    except ValueError as error:
        raise BadSchedule(f"{printable(path)}: {error}") from error


def _times(options: argparse.Namespace) -> dict[TaskKind, float]:
    return {"fwd": options.fwd, "bwd": options.bwd, "bwdA": options.bwd_a, "bwdW": options.bwd_w}


def _fitted(grid: str) -> str:
    """Cuts the grid into parts as wide as the terminal, one below the other, if there is a terminal."""
    rows = grid.splitlines()
    indent = len(str(len(rows) - 1)) + 2
    longest = max(map(len, rows))
    width = max(shutil.get_terminal_size().columns - indent, 20) if sys.stdout.isatty() else longest
    starts = range(indent, longest, width)
    if len(starts) * len(rows) > GRID_LINES and sys.stdout.isatty():
        return f"(a grid of {len(starts) * len(rows)} lines; -o FILE.svg draws it, and | less -S shows it)"
    parts = ("\n".join(row[:indent] + row[start : start + width] for row in rows) for start in starts)
    return "\n\n".join(parts)


def _write(path: Path, tasks: TaskLists, simulation: Simulation, title: str, slices: int) -> None:
    suffix = path.suffix.lower()
    if suffix in PICTURES:
        draw_timeline(simulation, path, title, slices=slices)
    elif suffix == ".json":
        chrome_trace(simulation, path)
    else:
        text = to_text(tasks, "csv" if suffix == ".csv" else "tasks", slices)
        path.write_text(f"{text}\n", encoding="utf-8")


def _compare(options: argparse.Namespace) -> int:
    comparison = compare(
        options.groups,
        options.microbatches,
        _times(options),
        options.latency,
        options.memory_limit,
        options.stages_per_group,
        options.slices,
    )
    slices = f", {options.slices} slices" if options.slices > 1 else ""
    title = f"{options.groups} groups, {options.microbatches} microbatches{slices}"
    print(f"{title}\n\n{_ranking(comparison, options.memory_limit)}")
    if options.output:
        candidates = (*comparison.candidates, *comparison.over_limit)
        pages = {f"{c.name}, {c.schedule.num_stages} stages": c.simulation for c in candidates}
        limit = options.memory_limit if math.isfinite(options.memory_limit) else None
        draw_comparison(pages, options.output, title, limit)
    return ExitCode.OK


def _ranking(comparison: Comparison, memory_limit: float) -> str:
    rows: list[Sequence[str]] = [("", "schedule", "stages", "makespan", "bubble", "period", "memory")]
    rows += [(str(rank), *_row(candidate)) for rank, candidate in enumerate(comparison.candidates, start=1)]
    rows += [("", *_row(candidate)) for candidate in comparison.over_limit]
    lines = aligned(rows, left={1})
    if comparison.over_limit:
        lines.insert(1 + len(comparison.candidates), f"over the limit of {memory_limit:g}:")
    if comparison.refusals:
        lines += ["left out:", *(f"   {reason}" for reason in comparison.refusals)]
    return "\n".join(lines)


def _row(candidate: SimulatedSchedule) -> tuple[str, ...]:
    simulation, schedule = candidate.simulation, candidate.schedule
    times = (f"{simulation.makespan:.5g}", f"{simulation.bubble:.1%}", f"{candidate.period:.5g}")
    return (candidate.name, str(schedule.num_stages), *times, f"{candidate.peak:.4g}")


def _check(options: argparse.Namespace) -> int:
    code = ExitCode.OK
    for path in options.files:
        try:
            schedule = _read(path)
        except BadSchedule as error:
            print(error)
            code = max(code, ExitCode.FAULT)
            continue
        except OSError as error:
            print(f"mpmd: error: {printable(path)}: {error.strerror}", file=sys.stderr)
            code = ExitCode.USAGE
            continue
        simulation = simulate(schedule.lists, Costs(atomic=True), slices=schedule.slices)
        chart = Chart.of(simulation, slices=schedule.slices)
        print(f"{printable(path)}: OK: {chart.size}: {chart.figures}")
    return code


def _list(options: argparse.Namespace) -> int:
    rows = [("schedule", "stages per group", "")]
    for name, family in ALL_FAMILIES.items():
        summary = (family.schedule.__doc__ or "").splitlines()[0].replace("``", "")
        rows.append((name, str(family.stages_per_group), summary))
    print("\n".join(aligned(rows, left={0, 2})))
    return ExitCode.OK
