"""The messages between groups, as data and as text."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from mpmd.explanation.uses import TaskUse
from mpmd.ir.plan import Aval
from mpmd.util.grouping import grouped
from mpmd.util.tables import first_few, human_bytes, numbers_text, table


@dataclasses.dataclass(frozen=True)
class SentValue:
    """A value that one group sends to another.

    Attributes:
      aval: the shape and dtype of the value.
      count: how often it is sent in one step: once for each microbatch, or once.
      nbytes: the bytes that travel in one step: ``count`` whole values if both groups have one process.
      made_by, read_by: the task that makes the value, none for an argument, and the receiver's tasks that
        read it.
      kept_as: the paths of the results that the value is.
      is_repeated: whether it is sent for each microbatch, and does not depend on the microbatch.
    """

    aval: Aval
    count: int
    nbytes: int
    made_by: TaskUse | None
    read_by: tuple[TaskUse, ...]
    kept_as: tuple[str, ...]
    is_repeated: bool


@dataclasses.dataclass(frozen=True)
class EdgeTraffic:
    """The values that one group sends to another group in one step.

    Attributes:
      bytes_by_processes: the bytes from each process of the sender to each process of the receiver.
    """

    src: int
    dst: int
    values: tuple[SentValue, ...]
    bytes_by_processes: Mapping[tuple[int, int], int]

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_processes.values())

    def __str__(self) -> str:
        return edge_table([self])


def edge_table(edges: Sequence[EdgeTraffic]) -> str:
    header = ("groups", "values", "bytes", "per step", "type", "sent by", "read by", "made at")
    receivers = grouped(
        ((edge.src, number, *alike), edge.dst) for edge in edges for alike, number in _counts(edge).items()
    )
    rows = [
        (f"{src} to {numbers_text(dsts)}", str(number), human_bytes(number * nbytes), *cells)
        for (src, number, nbytes, cells), dsts in receivers.items()
    ]
    return table(header, rows)


def _counts(edge: EdgeTraffic) -> collections.Counter[tuple[int, tuple[str, ...]]]:
    """Counts the values of an edge that differ neither in their bytes nor in their cells."""
    return collections.Counter((value.nbytes // value.count, _sent_cells(value)) for value in edge.values)


def _sent_cells(value: SentValue) -> tuple[str, ...]:
    readers = dict.fromkeys((*(use.task for use in value.read_by), *value.kept_as))
    maker, lines = (value.made_by.task, value.made_by.lines) if value.made_by else ("an argument", ())
    return f"x {value.count}", str(value.aval), maker, first_few(readers), first_few(map(str, lines))
