"""Reads lists of tasks from text, and simulates them: in order on each group, with messages between them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable

from mpmd.ir.plan import Cell, Task, parse_cell

UNITS = {"fwd": 1, "bwd": 2, "bwdA": 1, "bwdW": 1}


@dataclasses.dataclass(frozen=True)
class Simulated:
    """How long lists of tasks take, and for each group how long it waits between its first task and last."""

    makespan: float
    idle: list[float]


def parse(text: str) -> list[list[Cell]]:
    """The lists of a text with one line per group."""
    lines = text.strip().splitlines()
    return [[parse_cell(cell) for cell in re.findall(r"FusedTask\(.*?\)|\S+", line)] for line in lines]


def flat(cells: list[Cell]) -> list[Task]:
    """The tasks of cells."""
    return [task for cell in cells for task in cell.tasks]


def simulate(
    lists: list[list[Cell]],
    time: Callable[[Task], float] = lambda task: UNITS[task.kind],
    hop: float = 0,
    fused: bool = False,
) -> Simulated | None:
    """Runs the lists; ``None`` if they get stuck.

    A message to another group takes ``hop``. The members of a fused task run one after another; as ``fused``,
    all of them wait for what any of them needs, and hand on what they make when the last has ended.
    """
    members = [[(task,) for task in flat(cells)] for cells in lists]
    runs = [[cell.tasks for cell in cells] for cells in lists] if fused else members
    home = {task.stage: i for i, cells in enumerate(lists) for task in flat(cells)}
    made: dict[tuple[str, int, int], float] = {}
    free, ran = [0.0] * len(runs), [0] * len(runs)
    first: dict[int, float] = {}
    progress = True
    while progress:
        progress = False
        for i, cells in enumerate(runs):
            while ran[i] < len(cells):
                cell = cells[ran[i]]
                made_here = {output(task) for task in cell}
                needed = {value for task in cell for value in inputs(task, max(home))} - made_here
                if not needed <= made.keys():
                    break
                start = max([free[i], *(made[value] + hop * (home[value[1]] != i) for value in needed)])
                first.setdefault(i, start)
                free[i] = start + sum(map(time, cell))
                made |= dict.fromkeys(made_here, free[i])
                ran[i] += 1
                progress = True
    if ran != [len(cells) for cells in runs]:
        return None
    busy = [sum(map(time, flat(cells))) for cells in lists]
    return Simulated(max(free), [free[i] - first.get(i, 0.0) - busy[i] for i in range(len(lists))])


def output(task: Task) -> tuple[str, int, int]:
    """The value that a task makes; a ``bwdW`` makes one that no task needs."""
    value = {"fwd": "activation", "bwd": "gradient", "bwdA": "gradient", "bwdW": "addend"}[task.kind]
    return value, task.stage, task.microbatch


def inputs(task: Task, last_stage: int) -> set[tuple[str, int, int]]:
    """The values that a task waits for."""
    stage, microbatch = task.stage, task.microbatch
    if task.kind == "fwd":
        return {("activation", stage - 1, microbatch)} if stage else set()
    if task.kind == "bwdW":
        return {("gradient", stage, microbatch)}
    after = {("gradient", stage + 1, microbatch)} if stage < last_stage else set()
    return {("activation", stage, microbatch)} | after


def peaks(lists: list[list[Cell]], until: tuple[str, ...] = ("bwd", "bwdW")) -> list[int]:
    """For each group the most forwards that no task of the kinds ``until`` has followed."""
    changes = [[(task.kind == "fwd") - (task.kind in until) for task in flat(cells)] for cells in lists]
    return [max(itertools.accumulate(of_group)) for of_group in changes]
