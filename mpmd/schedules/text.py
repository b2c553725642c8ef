"""Lists of tasks as text: in the forms of people, of this package and of PyTorch.

The grammar, one row per group::

    row     ::= [group] cell*                                  between cells: white space, "|" or ","
    cell    ::= task | "FusedTask(" task ("," task)+ ")"       fwd_2__1, as ``str(cell)`` prints it
              | short ("+" short)*                             2F1, F0+B0---, as ``schedule_grid`` prints it
              | "(" short (";" short)+ ")OVERLAP_F_B"          (2F1;3B0)OVERLAP_F_B, as PyTorch prints it
              | "." | '""' |                                   idle: left out
    short   ::= [stage] letter microbatch "-"*
    letter  ::= "F" | "B" | "A" | "I" | "W"

``F`` is a ``fwd``, ``B`` a ``bwd``, ``W`` a ``bwdW``, and both ``A`` (here) and ``I`` (in PyTorch) are a
``bwdA``. A task without a stage belongs to the stage that has the number of its group; grids leave the stage
out where each group runs that stage alone. A row may begin with the number of its group. Blank rows are
skipped, and a group without tasks is a row with an idle cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from mpmd.ir.plan import Cell, FusedTask, Task, TaskKind, parse_cell
from mpmd.schedules.base import TaskLists
from mpmd.validation import raise_faults, str_fault

Form = Literal["tasks", "csv"]

LETTERS: dict[TaskKind, str] = {"fwd": "F", "bwd": "B", "bwdA": "A", "bwdW": "W"}
"""The letter of each kind of task."""

_KINDS: dict[str, TaskKind] = {letter: kind for kind, letter in LETTERS.items()} | {"I": "bwdA"}

_SHORT = r"\d*[FBAIW]\d+-*"
_CELL = re.compile(rf"FusedTask\([^)]*\)|\([^)]*\)\w*|{_SHORT}(?:\s*\+\s*{_SHORT})*(?![^\s|,])|[^\s|,]+")
_SHORT_TASK = re.compile(r"(\d*)([FBAIW])(\d+)-*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+((SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_IDLE = (".", '""')


def to_text(tasks: TaskLists, form: Form = "tasks") -> str:
    """Writes lists of tasks, one row per group; ``from_text`` reads them back.

    Args:
      form: ``"tasks"``: cells as ``str`` prints them, with ``|`` between them. ``"csv"``: the form in which
        PyTorch's pipeline schedules load and dump the order of computations (their ``compute_only`` format);
        a ``FusedTask`` is an ``OVERLAP_F_B`` there.

    Neither form shows idle time; the grid of ``mpmd.render.schedule_grid`` does, and ``from_text`` reads it,
    too.

    Source of the second form: ``_Action`` and ``_load_csv`` of PyTorch's
    ``torch.distributed.pipelining.schedules``.
    """
    if form == "tasks":
        return "\n".join(" | ".join(map(str, cells)) or "." for cells in tasks)
    return "\n".join(",".join(map(_action, cells)) or '""' for cells in tasks)


def short_text(cell: Cell, with_stage: bool) -> str:
    """The cell in few characters: ``F0+B0``, or with stages ``2F0+2B0``."""
    return "+".join(
        f"{task.stage if with_stage else ''}{LETTERS[task.kind]}{task.microbatch}" for task in cell.tasks
    )


def _action(cell: Cell) -> str:
    actions = [short_text(task, with_stage=True).replace("A", "I") for task in cell.tasks]
    return actions[0] if isinstance(cell, Task) else f"({';'.join(actions)})OVERLAP_F_B"


def from_text(text: str) -> list[list[Cell]]:
    """Reads lists of tasks, of which each cell may be in any of the forms above.

    Whether the lists can run is not checked; ``check_schedule`` does that.

    Raises ``ValueError`` with the line and column of all text that is no cell.
    """
    raise_faults(str_fault("text", text))
    groups: list[list[Cell]] = []
    faults: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        cells: list[Cell] = []
        for column, word in _words(line):
            try:
                if word.isdecimal() and not line[: column - 1].strip():
                    _check_label(word, len(groups))
                elif word not in _IDLE:
                    cells.append(_parse(word, len(groups)))
            except ValueError as error:
                faults.append(f"line {number}, column {column}: {error}")
        groups.append(cells)
    if not groups:
        faults.append("there are no tasks; write one row of them per group")
    if faults:
        raise ValueError("\n".join(faults))
    return groups


def _words(line: str) -> Iterator[tuple[int, str]]:
    """The cells of a line as text, each with the column where it begins."""
    return ((match.start() + 1, match.group()) for match in _CELL.finditer(line))


def _check_label(word: str, group: int) -> None:
    if int(word) != group:
        raise ValueError(f"the row of group {group} is called {word}; write the groups in order, from 0 on")


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
