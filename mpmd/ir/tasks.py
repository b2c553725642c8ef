"""Tasks, which print as text that parses back.

The grammar of the text::

    task         ::= cell | outside
    cell         ::= single | "FusedTask(" single ("," single)+ ")"
    single       ::= kind "_" stage "__" microbatch                   fwd_2__1
    kind         ::= "fwd" | "bwd" | "bwdA" | "bwdW"
    outside      ::= ("before" | "after") "_" level                   after_0
                   | "between_" loop "__" level                       between_1__0

Stages are numbered through all loops of a step: with 4 stages each, a second loop has stages 4 to 7.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, NamedTuple

TaskKind = Literal["fwd", "bwd", "bwdA", "bwdW"]

_TASK = re.compile(r"(fwd|bwd|bwdA|bwdW)_(\d+)__(\d+)")
_FUSED = re.compile(r"FusedTask\((.*)\)")
_OUTSIDE = re.compile(r"(before|after|between_(\d+)_)_(\d+)")


class TaskType(NamedTuple):
    """A kind of task and a stage: the type of its tasks for all microbatches; prints as ``fwd_2``."""

    kind: TaskKind
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}_{self.stage}"


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One kind of task of one stage on one microbatch; prints as ``fwd_2__1``."""

    kind: TaskKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}_{self.stage}__{self.microbatch}"

    @property
    def type(self) -> TaskType:
        return TaskType(self.kind, self.stage)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task itself, so that a ``Task`` reads like a ``FusedTask``."""
        return (self,)


@dataclasses.dataclass(frozen=True)
class FusedTask:
    """Tasks that run as one executable; prints as ``FusedTask(fwd_3__0, bwd_3__0)``."""

    tasks: tuple[Task, ...]

    def __str__(self) -> str:
        return f"FusedTask({', '.join(map(str, self.tasks))})"


Cell = Task | FusedTask
"""The next task, or fused tasks, of a group in a schedule."""


@dataclasses.dataclass(frozen=True, order=True)
class OutsideTask:
    """The task of one group outside of microbatch loops; prints as ``after_0`` or ``between_1__0``.

    Attributes:
      side: the segment of the step: before all loops, after all, or between two.
      level: the number of exchanges between groups that come before the task, from the last loop on.
      loop: between two loops, the number of the second loop; otherwise 0.
    """

    side: Literal["before", "between", "after"]
    level: int
    loop: int = 0

    def __str__(self) -> str:
        if self.side == "between":
            return f"between_{self.loop}__{self.level}"
        return f"{self.side}_{self.level}"


AnyTask = Cell | OutsideTask


def parse_task(text: str) -> AnyTask:
    if match := _OUTSIDE.fullmatch(text.strip()):
        side, loop, level = match.groups()
        if loop is not None:
            return OutsideTask("between", int(level), int(loop))
        return OutsideTask(side, int(level))  # type: ignore[arg-type]
    return parse_cell(text)


def parse_cell(text: str) -> Cell:
    text = text.strip()
    if match := _TASK.fullmatch(text):
        kind, stage, microbatch = match.groups()
        return Task(kind, int(stage), int(microbatch))  # type: ignore[arg-type]
    if match := _FUSED.fullmatch(text):
        members = [parse_cell(member) for member in match.group(1).split(",")]
        if len(members) > 1 and all(isinstance(member, Task) for member in members):
            return FusedTask(tuple(members))  # type: ignore[arg-type]
    raise ValueError(
        f"{text!r} is not a task; write e.g. 'fwd_2__1' (stage 2, microbatch 1) or "
        "'FusedTask(fwd_3__0, bwd_3__0)'"
    )
