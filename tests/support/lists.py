"""Reads lists of tasks from text, and measures them."""

from __future__ import annotations

import re

from mpmd.ir.plan import Cell, Task, TaskType, parse_cell
from mpmd.schedules import TaskTimes
from mpmd.simulate import Costs, Link, Simulation


def parse(text: str) -> list[list[Cell]]:
    """The lists of a text with one line per group."""
    lines = text.strip().splitlines()
    return [[parse_cell(cell) for cell in re.findall(r"FusedTask\(.*?\)|\S+", line)] for line in lines]


def flat(cells: list[Cell]) -> list[Task]:
    """The tasks of cells."""
    return [task for cell in cells for task in cell.tasks]


def spans(simulation: Simulation) -> list[tuple[float, float]]:
    """For each group the start of its first event and the end of its last."""
    rows = [[e for e in simulation.events if e.mpmd_idx == i] for i in range(simulation.mpmd_dim)]
    return [(row[0].start, row[-1].end) for row in rows]


def waits(simulation: Simulation) -> list[float]:
    """For each group how long it waits between its first event and its last."""
    return [b - a - busy for (a, b), busy in zip(spans(simulation), simulation.busy, strict=True)]


def costs_of(times: TaskTimes, lists: list[list[Cell]]) -> Costs:
    """The times that a schedule was found for, as costs of its tasks."""
    tasks = {TaskType(task.kind, task.stage): times.of(task) for cells in lists for task in flat(cells)}
    return Costs(tasks=tasks, link=Link(times.hop))
