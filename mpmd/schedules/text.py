"""Lists of tasks as text: in the forms of people, of this package and of PyTorch.

The grammar, one row per group::

    row     ::= [group] cell*                                  between cells: white space, "|" or ","
    cell    ::= task | "FusedTask(" task ("," task)+ ")"       fwd_2__1, as ``str(cell)`` prints it
              | short ("+" short)*                             2F1, F0+B0---, as ``schedule_grid`` prints it
              | "(" short (";" short)+ ")OVERLAP_F_B"          (2F1;3B0)OVERLAP_F_B, as PyTorch prints it
              | "." | '""' |                                   idle: left out
    task    ::= kind "_" stage "__" microbatch [slice]
    short   ::= [stage] letter microbatch [slice] "-"*
    letter  ::= "F" | "B" | "A" | "I" | "W"
    slice   ::= "s" number                                     2F1s3: slice 3 of microbatch 1

``F`` is a ``fwd``, ``B`` a ``bwd``, ``W`` a ``bwdW``, and both ``A`` (here) and ``I`` (in PyTorch) are a
``bwdA``. A task without a stage belongs to the stage that has the number of its group; grids leave the stage
out where each group runs that stage alone. Either all tasks name their slice or none does. A row may begin
with the number of its group. Blank rows are skipped, and a group without tasks is a row with an idle cell.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, NamedTuple

from mpmd.ir.plan import Cell, FusedTask, Task, TaskKind, parse_cell
from mpmd.ir.slices import SliceNumbers
from mpmd.schedules.base import TaskLists
from mpmd.validation import raise_faults, size_fault, str_fault

Form = Literal["tasks", "csv"]

LETTERS: dict[TaskKind, str] = {"fwd": "F", "bwd": "B", "bwdA": "A", "bwdW": "W"}

_KINDS: dict[str, TaskKind] = {letter: kind for kind, letter in LETTERS.items()} | {"I": "bwdA"}

_SHORT = r"\d*[FBAIW]\d+(?:s\d+)?-*"
_CELL = re.compile(rf"FusedTask\([^)]*\)|\([^)]*\)\w*|{_SHORT}(?:\s*\+\s*{_SHORT})*(?![^\s|,])|[^\s|,]+")
_SLICE = re.compile(r"(?<=\d)s(\d+)")
_SHORT_TASK = re.compile(r"(\d*)([FBAIW])(\d+)-*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+((SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_IDLE = (".", '""')


def to_text(tasks: TaskLists, form: Form = "tasks", slices: int = 1) -> str:
    """Writes lists of tasks, one row per group; ``from_text`` reads them back.

    Args:
      form: ``"tasks"``: cells as ``str`` prints them, with ``|`` between them. ``"csv"``: the form in which
        PyTorch's pipeline schedules load and dump the order of computations (their ``compute_only`` format);
        a ``FusedTask`` is an ``OVERLAP_F_B`` there.
      slices: the number of slices of each microbatch; tasks name their slice if there are several.

    Neither form shows idle time; the grid of ``mpmd.render.schedule_grid`` does, and ``from_text`` reads it,
    too.

    Source of the second form: ``_Action`` and ``_load_csv`` of PyTorch's
    ``torch.distributed.pipelining.schedules``.
    """
    numbers = slice_numbers(tasks, slices)
    if form == "tasks":
        return "\n".join(" | ".join(map(numbers.task_text, cells)) or "." for cells in tasks)
    return "\n".join(",".join(_action(cell, numbers) for cell in cells) or '""' for cells in tasks)


def slice_numbers(tasks: TaskLists, slices: int) -> SliceNumbers:
    """The numbers of the stages that the tasks are of. Raises ``ValueError`` if slices differ in stages."""
    raise_faults(size_fault("slices", slices))
    numbers = {task.stage for cells in tasks for cell in cells for task in cell.tasks}
    return SliceNumbers.of(max(numbers, default=slices - 1) + 1, slices)


def short_text(cell: Cell, with_stage: bool, numbers: SliceNumbers) -> str:
    """The cell in few characters: ``F0+B0``, with stages ``2F0+2B0``, with slices ``2F0s3``."""
    return "+".join(_short_task(task, with_stage, numbers) for task in cell.tasks)


def _short_task(task: Task, with_stage: bool, numbers: SliceNumbers) -> str:
    stage = numbers.stage_of(task.stage) if with_stage else ""
    return f"{stage}{LETTERS[task.kind]}{task.microbatch}{numbers.suffix(task)}"


def _action(cell: Cell, numbers: SliceNumbers) -> str:
    actions = [short_text(task, True, numbers).replace("A", "I") for task in cell.tasks]
    return actions[0] if isinstance(cell, Task) else f"({';'.join(actions)})OVERLAP_F_B"


def from_text(text: str) -> list[list[Cell]]:
    """Reads lists of tasks, of which each cell may be in any of the forms above.

    Whether the lists can run is not checked; ``check_schedule`` does that. If tasks name their slice, their
    stages are numbered as ``SliceNumbers`` says.

    Raises ``ValueError`` with the line and column of all text that is no cell.
    """
    return read_lists(text).lists


class ReadLists(NamedTuple):
    lists: list[list[Cell]]
    slices: int


class _ReadCell(NamedTuple):
    cell: Cell
    slices: tuple[int, ...]


def read_lists(text: str) -> ReadLists:
    groups = _read_cells(text)
    read = [cell for cells in groups for cell in cells]
    if not any(cell.slices for cell in read):
        return ReadLists([[cell.cell for cell in cells] for cells in groups], 1)
    slices = 1 + max(number for cell in read for number in cell.slices)
    num_stages = 1 + max(task.stage for cell in read for task in cell.cell.tasks)
    numbers = SliceNumbers(num_stages, slices)
    return ReadLists([[_numbered(cell, numbers) for cell in cells] for cells in groups], slices)


def _numbered(read: _ReadCell, numbers: SliceNumbers) -> Cell:
    tasks = tuple(
        dataclasses.replace(task, stage=numbers.number(task.stage, slice_index))
        for task, slice_index in zip(read.cell.tasks, read.slices, strict=True)
    )
    return FusedTask(tasks) if isinstance(read.cell, FusedTask) else tasks[0]


def _read_cells(text: str) -> list[list[_ReadCell]]:
    raise_faults(str_fault("text", text))
    groups: list[list[_ReadCell]] = []
    with_slices: set[bool] = set()
    faults: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        cells: list[_ReadCell] = []
        for match in _CELL.finditer(line):
            word = match.group()
            try:
                if word.isdecimal() and not line[: match.start()].strip():
                    _check_label(word, len(groups))
                elif word not in _IDLE:
                    cells.append(_parse_sliced(word, len(groups)))
                    with_slices.add(bool(cells[-1].slices))
                    if len(with_slices) > 1:
                        raise ValueError(f"{word!r} and others do not agree; name the slice of all or none")
            except ValueError as error:
                faults.append(f"line {number}, column {match.start() + 1}: {error}")
        groups.append(cells)
    if not groups:
        faults.append("there are no tasks; write one row of them per group")
    if faults:
        raise ValueError("\n".join(faults))
    return groups


def _check_label(word: str, group: int) -> None:
    if int(word) != group:
        raise ValueError(f"the row of group {group} is called {word}; write the groups in order, from 0 on")


def _parse_sliced(word: str, group: int) -> _ReadCell:
    slices = tuple(map(int, _SLICE.findall(word)))
    cell = _parse(_SLICE.sub("", word), group)
    if slices and len(slices) != len(cell.tasks):
        raise ValueError(f"{word!r} names the slice of some of its tasks; name that of all or none")
    return _ReadCell(cell, slices)


def _parse(word: str, group: int) -> Cell:
    if match := _OVERLAP.fullmatch(word):
        return _fused([_short(part.strip(), group) for part in match.group(1).split(";")], word)
    if _COMMUNICATION.fullmatch(word):
        raise ValueError(f"{word!r} is a communication, which follows from the tasks; leave it out")
    parts = [part.strip() for part in word.split("+")]
    if all(map(_SHORT_TASK.fullmatch, parts)):
        members = [_short(part, group) for part in parts]
        return members[0] if len(members) == 1 else _fused(members, word)
    return parse_cell(word)


def _fused(members: list[Task], word: str) -> FusedTask:
    if len(members) < 2:
        raise ValueError(f"{word!r} fuses nothing; write at least two tasks")
    return FusedTask(tuple(members))


def _short(text: str, group: int) -> Task:
    match = _SHORT_TASK.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a task; write e.g. '2F1' (forward of stage 2, microbatch 1)")
    stage, letter, microbatch = match.groups()
    return Task(_KINDS[letter], int(stage or group), int(microbatch))
