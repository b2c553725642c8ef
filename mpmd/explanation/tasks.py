"""The user's functions that the tasks of a step run, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath

from mpmd.explanation.uses import SourceLine, groups_text
from mpmd.util.grouping import grouped
from mpmd.util.tables import first_few, human_bytes, numbers_text, table


@dataclasses.dataclass(frozen=True)
class FunctionShare:
    """A task's share of one function.

    Attributes:
      line: the first line of the function; ``None`` for equations that ``treduce`` and the compiler add.
      equations: the number of equations.
      operations: about how many operations one run takes.
    """

    line: SourceLine | None
    equations: int
    operations: int


@dataclasses.dataclass(frozen=True)
class TaskSummary:
    """A task of a group.

    Attributes:
      task: the task of any microbatch, e.g. ``fwd_0``.
      runs: how often the task runs in one step.
      executable: the name of its executable, which equal tasks share.
      input_bytes, output_bytes: the bytes of its inputs and of its outputs, on each device.
      donated_bytes: the bytes of the inputs whose buffers the outputs take over, on each device.
      temporary_bytes: the bytes that XLA allocates on each device while the task runs; ``None``: unknown.
      functions: the functions of the user, the function with the most operations first.
    """

    task: str
    mpmd_idx: int
    runs: int
    executable: str
    input_bytes: int
    output_bytes: int
    donated_bytes: int
    temporary_bytes: int | None
    functions: tuple[FunctionShare, ...]

    @property
    def equations(self) -> int:
        return sum(share.equations for share in self.functions)

    @property
    def operations(self) -> int:
        """About how many operations one run takes."""
        return sum(share.operations for share in self.functions)

    def __str__(self) -> str:
        header = (f"{self.task} on {groups_text([self.mpmd_idx])}", "equations", "operations")
        rows = [
            (f"  {share.line or 'treduce'}", str(share.equations), f"{share.operations:.1e}")
            for share in self.functions
        ]
        return table(header, rows)


def sources_of(tasks: Sequence[TaskSummary]) -> dict[str, tuple[str, ...]]:
    return {
        task.executable: tuple(_function(share.line) for share in task.functions if share.line is not None)
        for task in tasks
    }


def task_table(tasks: Sequence[TaskSummary]) -> str:
    sizes = ("takes", "makes", "XLA")
    header = ("task", "on groups", "per step", "equations", "operations", *sizes, "functions")
    alike = grouped((_task_cells(task), task) for task in tasks)
    rows = [
        (
            first_few(dict.fromkeys(task.task for task in same)),
            numbers_text([task.mpmd_idx for task in same]),
            *cells,
        )
        for cells, same in alike.items()
    ]
    return table(header, rows)


def _task_cells(task: TaskSummary) -> tuple[str, ...]:
    large = [share for share in task.functions if 0 < task.operations <= 100 * share.operations][:3]
    shares = [f"{100 * share.operations // task.operations}% {_function(share.line)}" for share in large]
    return (
        f"x {task.runs}",
        str(task.equations),
        f"{task.operations:.1e}",
        human_bytes(task.input_bytes),
        human_bytes(task.output_bytes),
        human_bytes(task.temporary_bytes),
        ", ".join([*shares, "…"] if len(task.functions) > len(large) else shares),
    )


def _function(line: SourceLine | None) -> str:
    if line is None:
        return "treduce"
    return f"{line.function} ({line.callee or f'{PurePath(line.file).name}:{line.number}'})"
