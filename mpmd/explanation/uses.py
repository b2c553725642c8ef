"""The tasks and the lines of the user's program that read and make values, as data and as text."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from mpmd.util.grouping import grouped
from mpmd.util.tables import aligned, numbers_text


@dataclasses.dataclass(frozen=True, order=True)
class SourceLine:
    """A line of the user's program.

    Attributes:
      file: the path of the file.
      number: the number of the line, from 1 on.
      function: the function that the line is in.
      callee: the function of an installed package that the line calls, e.g. ``optax.apply_updates``; or "".
    """

    file: str
    number: int
    function: str
    callee: str = ""

    def __str__(self) -> str:
        text = f"{PurePath(self.file).name}:{self.number} {self.function}"
        return f"{text} ({self.callee})" if self.callee else text


@dataclasses.dataclass(frozen=True)
class TaskUse:
    """A task on a group that reads a value, or makes it.

    Attributes:
      task: the task of any microbatch, e.g. ``fwd_0``; outside the loop e.g. ``after_0``.
      stages: the stages of the task; none outside of loops.
      lines: the user's lines whose equations read or make the value.
    """

    task: str
    mpmd_idx: int
    stages: tuple[int, ...]
    lines: tuple[SourceLine, ...]

    @property
    def in_loop(self) -> bool:
        return bool(self.stages)


def tasks_text(uses: Iterable[TaskUse]) -> str:
    """Tasks with their groups, e.g. ``fwd_0, bwd_0 on 0; after_1 on 0..3``."""
    groups: dict[str, dict[int, None]] = collections.defaultdict(dict)
    for use in sorted(uses, key=lambda use: not use.in_loop):
        groups[use.task][use.mpmd_idx] = None
    tasks = grouped((tuple(mpmd_idxs), task) for task, mpmd_idxs in groups.items())
    if len(tasks) == 1:
        return ", ".join(groups)
    return "; ".join(f"{', '.join(names)} on {numbers_text(idxs)}" for idxs, names in tasks.items())


def use_lines(uses: Iterable[TaskUse]) -> list[str]:
    groups = grouped(((use.task, line), use.mpmd_idx) for use in uses for line in use.lines or (None,))
    return aligned(
        [(f"    {task}", f"on {groups_text(idxs)}", str(line or "")) for (task, line), idxs in groups.items()]
    )


def groups_text(mpmd_idxs: Sequence[int]) -> str:
    if not mpmd_idxs:
        return "no group"
    return f"{'group' if len(mpmd_idxs) == 1 else 'groups'} {numbers_text(mpmd_idxs)}"
