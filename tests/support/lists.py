"""Measures lists of tasks."""

from __future__ import annotations

from mpmd.ir.plan import Cell, Task, TaskType
from mpmd.schedules import TaskTimes
from mpmd.simulate import Costs, Link, Simulation, simulate


def flat(cells: list[Cell]) -> list[Task]:
    """The tasks of cells."""
    return [task for cell in cells for task in cell.tasks]


def figures(lists: list[list[Cell]]) -> tuple[float, list[float]]:
    """The makespan, and the most microbatches that each group holds."""
    simulated = simulate(lists)
    return simulated.makespan, list(simulated.peaks)


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
