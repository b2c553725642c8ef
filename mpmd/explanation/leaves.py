"""The groups of a step's arguments and results, with the reasons, as data and as text."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

from mpmd.explanation.uses import TaskUse, groups_text, tasks_text, use_lines
from mpmd.ir.plan import Aval, LoopStages, Spec
from mpmd.util.tables import group_leaves, human_bytes, numbers_text, table


@dataclasses.dataclass(frozen=True)
class PlacedLeaf:
    """An argument or a result with the groups that hold it.

    Attributes:
      device_bytes: the bytes of its shard on each device; the largest number of any group.
    """

    path: str
    aval: Aval
    mpmd_idxs: tuple[int, ...]
    spec: Spec | None
    device_bytes: int

    def __str__(self) -> str:
        sharded = f", sharded {self.spec}" if self.spec and any(self.spec) else ""
        size = human_bytes(self.device_bytes)
        if self.device_bytes < self.aval.nbytes:
            size = f"{human_bytes(self.aval.nbytes)}, {size} on each device"
        return f"{self.path}: {self.aval}, {size}, on {groups_text(self.mpmd_idxs)}{sharded}"


@dataclasses.dataclass(frozen=True)
class InputSummary(PlacedLeaf):
    """A leaf of the arguments. It is on the groups whose tasks read it, and where a result takes its place.

    Without a loop, the groups that hold a leaf send it to the groups that read it.

    Attributes:
      read_by: the tasks that read the leaf.
      updated: the path of the result that takes its place in the next step, if any.
    """

    donated: bool
    read_by: tuple[TaskUse, ...]
    updated: str | None


@dataclasses.dataclass(frozen=True)
class OutputSummary(PlacedLeaf):
    """A leaf of the result. It is on the groups that make it, or where the argument is that it replaces.

    Attributes:
      made_by: the task that makes it, on each group that computes it; none for a returned argument.
      arguments: the arguments of its size from which it is computed.
      tasks: the tasks that make the further values of its size from which it is computed. A task in the loop
        accumulates such a value over the microbatches; a weight that several stages share has one for each.
      updates: the path of the argument whose place it takes in the next step, if any.
    """

    made_by: tuple[TaskUse, ...]
    arguments: tuple[str, ...]
    tasks: tuple[TaskUse, ...]
    updates: str | None

    @property
    def sent_to(self) -> tuple[int, ...]:
        makers = {use.mpmd_idx for use in self.made_by}
        return tuple(group for group in self.mpmd_idxs if makers and group not in makers)


@dataclasses.dataclass(frozen=True)
class LeafSummary:
    """An argument with the result that takes its place in the next step, or an argument or a result alone.

    ``str(leaf)`` says where it is, and which tasks and lines read and make it.
    """

    input: InputSummary | None
    output: OutputSummary | None

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(part.path for part in (self.input, self.output) if part is not None)

    def __str__(self) -> str:
        lines: list[str] = []
        if argument := self.input:
            lines.append(f"{argument}{', donated' if argument.donated else ''}")
            if argument.read_by:
                is_here = {use.mpmd_idx for use in argument.read_by} <= set(argument.mpmd_idxs)
                place = (
                    "is where it is read, by" if is_here else "stays where it is, and is sent; it is read by"
                )
                lines += [f"  {place}", *use_lines(argument.read_by)]
            else:
                lines.append("  is read by no task")
        if result := self.output:
            lines += [str(result), *_origin_lines(result)]
        return "\n".join(lines)


def _origin_lines(result: OutputSummary) -> list[str]:
    if not result.made_by:
        return [f"  is {result.arguments[0]} itself"]
    alone = " on each group for itself" if len(result.made_by) > 1 else ""
    lines = [f"  is made{alone} by", *use_lines(result.made_by)]
    if result.arguments:
        lines += ["  of", *(f"    {path}" for path in result.arguments)]
    if summed := [use for use in result.tasks if use.in_loop]:
        lines += ["  of what is accumulated over the microbatches by", *use_lines(summed)]
    if others := [use for use in result.tasks if not use.in_loop]:
        lines += ["  of what is made by", *use_lines(others)]
    if result.sent_to:
        where = f", where {result.updates} is" if result.updates else ""
        lines.append(f"  is sent to {groups_text(result.sent_to)}{where}")
    elif result.updates:
        lines.append(f"  takes the place of {result.updates}")
    return lines


def argument_table(leaves: Sequence[LeafSummary]) -> str:
    header = ("argument", "leaves", "bytes", "on groups", "read by", "updated by")
    pairs = ((leaf.input, leaf.output.made_by if leaf.output else ()) for leaf in leaves)
    return _leaf_table(header, [(leaf, (leaf.read_by, made_by)) for leaf, made_by in pairs if leaf])


def result_table(outputs: Sequence[OutputSummary]) -> str:
    header = ("other result", "leaves", "bytes", "on groups", "made by", "of")
    return _leaf_table(header, [(o, () if o.updates else (o.made_by, o.tasks)) for o in outputs])


def _leaf_table(
    header: Sequence[str], leaves: Iterable[tuple[PlacedLeaf, tuple[Sequence[TaskUse], ...]]]
) -> str:
    """Formats a table; leaves on the same groups that the same groups use share a line.

    Args:
      leaves: each leaf with the tasks in its two last columns; without tasks for a leaf that has no line.
    """
    by_name = {_with_part_first(leaf.path): (leaf, uses) for leaf, uses in leaves}
    keys = {
        name: (leaf.mpmd_idxs, *map(_groups_using, uses)) if uses else None
        for name, (leaf, uses) in by_name.items()
    }
    rows = []
    for name, names in group_leaves(keys):
        if keys[names[0]]:
            alike, uses = zip(*(by_name[each] for each in names), strict=True)
            tasks = [tasks_text(itertools.chain(*column)) for column in zip(*uses, strict=True)]
            path = alike[0].path if len(alike) == 1 else name
            nbytes = human_bytes(sum(leaf.device_bytes for leaf in alike))
            rows.append((path, str(len(alike)), nbytes, numbers_text(alike[0].mpmd_idxs), *tasks))
    return table(header, rows)


_PART_OF_STACK = re.compile(r"(\[[^\[\]]*\]|\.\w+)(\[(?::, )*\d+:\d+\])$")


def _with_part_first(path: str) -> str:
    """Moves the part of a stack before the last key, so that a part of several stacks is one line."""
    return _PART_OF_STACK.sub(r"\2\1", path)


def _groups_using(uses: Iterable[TaskUse]) -> frozenset[tuple[int, bool]]:
    return frozenset((use.mpmd_idx, use.in_loop) for use in uses)


def shared_table(leaves: Sequence[LeafSummary], loops: Sequence[LoopStages]) -> str:
    header = ("shared weight", "gradients accumulated by", "added by", "sent to groups")
    rows = []
    for leaf in leaves:
        if leaf.input and leaf.output and any(use.in_loop for use in leaf.input.read_by):
            parts = [use for use in leaf.output.tasks if use.in_loop]
            stages = [stage for use in parts for stage in use.stages[:1]]
            if any(sum(stage in loop.stages for stage in stages) > 1 for loop in loops):
                made_by, sent_to = tasks_text(leaf.output.made_by), numbers_text(leaf.output.sent_to)
                rows.append((leaf.input.path, tasks_text(parts), made_by, sent_to))
    return table(header, rows)
