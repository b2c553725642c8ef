"""What ``mpmd.explain`` returns: data for programs, which prints as text for people."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from mpmd.ir import Aval, Spec
from mpmd.report import human_bytes
from mpmd.text import aligned, few, gather, ranges, table

_RULE = """\
An argument is on the groups whose tasks read it. A result is on the groups that make it, or on those of the
argument whose place it takes in a next step."""


@dataclasses.dataclass(frozen=True, order=True)
class Line:
    """A line of the user's program.

    Attributes:
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
class Use:
    """That a task on a group reads a value, or makes it.

    Attributes:
      task: the task of any microbatch, e.g. ``fwd_0``; outside the loop e.g. ``after_0``.
      in_loop: whether it is a task of a stage.
      lines: the user's lines whose equations do it.
    """

    task: str
    mpmd_idx: int
    in_loop: bool
    lines: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class Input:
    """A leaf of the arguments; it is on the groups whose tasks read it, and where a result takes its place.

    Attributes:
      updated: the path of the result that takes its place in a next step, if any.
    """

    path: str
    aval: Aval
    mpmd_idxs: tuple[int, ...]
    spec: Spec
    donated: bool
    read_by: tuple[Use, ...]
    updated: str | None


@dataclasses.dataclass(frozen=True)
class Output:
    """A leaf of the result; it is where it is made, or where the argument is whose place it takes.

    Attributes:
      made_by: the task that makes it, on each group that computes it; none for a returned argument.
      arguments: the arguments of its size that it is made of.
      tasks: the tasks that make the other values of its size that it is made of. Those in the loop have
        accumulated them over the microbatches; a weight that several stages share has one of each.
      updates: the path of the argument whose place it takes in a next step, if any.
    """

    path: str
    aval: Aval
    mpmd_idxs: tuple[int, ...]
    spec: Spec | None
    made_by: tuple[Use, ...]
    arguments: tuple[str, ...]
    tasks: tuple[Use, ...]
    updates: str | None

    @property
    def sent_to(self) -> tuple[int, ...]:
        """The groups that receive it."""
        makers = {use.mpmd_idx for use in self.made_by}
        return tuple(group for group in self.mpmd_idxs if makers and group not in makers)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An argument with the result that takes its place in a next step, or either alone.

    ``str(leaf)`` says where it is, and names all that reads and makes it.
    """

    input: Input | None
    output: Output | None

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(part.path for part in (self.input, self.output) if part is not None)

    def __str__(self) -> str:
        lines: list[str] = []
        if leaf := self.input:
            lines.append(_place(leaf) + (", donated" if leaf.donated else ""))
            if leaf.read_by:
                lines += ["  is where it is read, by", *_use_lines(leaf.read_by)]
            else:
                lines.append("  is read by no task")
        if result := self.output:
            lines += [_place(result), *_origin_lines(result)]
        return "\n".join(lines)


def _origin_lines(result: Output) -> list[str]:
    if not result.made_by:
        return [f"  is {result.arguments[0]} itself"]
    alone = " on each group for itself" if len(result.made_by) > 1 else ""
    lines = [f"  is made{alone} by", *_use_lines(result.made_by)]
    if result.arguments:
        lines += ["  of", *(f"    {path}" for path in result.arguments)]
    if summed := [use for use in result.tasks if use.in_loop]:
        lines += ["  of what is accumulated over the microbatches by", *_use_lines(summed)]
    if others := [use for use in result.tasks if not use.in_loop]:
        lines += ["  of what is made by", *_use_lines(others)]
    if result.sent_to:
        lines.append(f"  is sent to {_groups(result.sent_to)}, where {result.updates} is")
    elif result.updates:
        lines.append(f"  takes the place of {result.updates}")
    return lines


@dataclasses.dataclass(frozen=True)
class Sent:
    """A value that one group sends to another.

    Attributes:
      count: how often in one step: once for each microbatch, or once.
      kept_as: the paths of the results that it is.
    """

    aval: Aval
    count: int
    made_by: Use
    read_by: tuple[Use, ...]
    kept_as: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Edge:
    """All that one group sends to another in one step."""

    src: int
    dst: int
    values: tuple[Sent, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in one step."""
        return sum(value.count * value.aval.nbytes for value in self.values)

    def __str__(self) -> str:
        return _edge_table([self])


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a function in a task.

    Attributes:
      line: the first of its lines; ``None`` for what ``treduce`` and the compiler add.
      operations: about how many, in one run.
    """

    line: Line | None
    equations: int
    operations: int


@dataclasses.dataclass(frozen=True)
class TaskSummary:
    """A task of a group.

    Attributes:
      task: the task of any microbatch, e.g. ``fwd_0``.
      runs: how often it runs in one step.
      executable: what it runs; equal tasks share it.
      input_bytes, output_bytes: of what it takes, and of what it makes.
      donated_bytes: of the inputs whose buffers the outputs take over.
      functions: the user's, those with the most operations first.
    """

    task: str
    mpmd_idx: int
    runs: int
    executable: str
    input_bytes: int
    output_bytes: int
    donated_bytes: int
    functions: tuple[Share, ...]

    @property
    def equations(self) -> int:
        return sum(share.equations for share in self.functions)

    @property
    def operations(self) -> int:
        """About how many, in one run."""
        return sum(share.operations for share in self.functions)

    def __str__(self) -> str:
        header = (f"{self.task} on {_groups([self.mpmd_idx])}", "equations", "operations")
        rows = [
            (f"  {share.line or 'treduce'}", str(share.equations), f"{share.operations:.1e}")
            for share in self.functions
        ]
        return table(header, rows)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why the values of a step are where they are. ``str(explanation)`` is an overview."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    edges: tuple[Edge, ...]
    tasks: tuple[TaskSummary, ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All arguments, then the results that take no argument's place."""
        by_path = {leaf.path: leaf for leaf in self.outputs}
        arguments = (Leaf(leaf, by_path.get(leaf.updated or "")) for leaf in self.inputs)
        return (*arguments, *(Leaf(None, leaf) for leaf in self.outputs if leaf.updates is None))

    def leaf(self, path: str) -> Leaf:
        """One argument or result; ``path`` is all or a part of its name, e.g. ``params['w']``.

        Raises: ``ValueError`` when there is none, or more than one.
        """
        leaves = {name: leaf for leaf in self.leaves for name in leaf.paths}
        if path in leaves:
            return leaves[path]
        found = dict.fromkeys(leaf for name, leaf in leaves.items() if path in name)
        if len(found) == 1:
            return next(iter(found))
        if found:
            several = [leaf.paths[0] for leaf in found]
            raise ValueError(f"{len(several)} leaves have {path} in their names; say more: {few(several, 8)}")
        close = difflib.get_close_matches(path, leaves, n=5, cutoff=0.3)
        raise ValueError(f"no leaf has {path} in its name; close ones: {', '.join(close) or 'none'}")

    def __str__(self) -> str:
        tables = (
            _argument_table(self.leaves),
            _result_table(self.outputs),
            _shared_table(self.leaves),
            _edge_table(self.edges),
            _task_table(self.tasks),
        )
        return "\n\n".join([_RULE, *filter(None, tables)])


# The tables of the overview.


def _argument_table(leaves: Sequence[Leaf]) -> str:
    header = ("argument", "leaves", "bytes", "on groups", "read by", "updated by")
    inputs = [leaf.input for leaf in leaves if leaf.input]
    updates = {leaf.input.path: leaf.output.made_by for leaf in leaves if leaf.input and leaf.output}
    return _leaf_table(header, inputs, {i.path: (i.read_by, updates.get(i.path, ())) for i in inputs})


def _result_table(outputs: Sequence[Output]) -> str:
    header = ("other result", "leaves", "bytes", "on groups", "made by", "of")
    return _leaf_table(header, outputs, {o.path: (o.made_by, o.tasks) for o in outputs if not o.updates})


def _leaf_table(
    header: Sequence[str],
    leaves: Sequence[Input] | Sequence[Output],
    uses: Mapping[str, tuple[Sequence[Use], ...]],
) -> str:
    """A table of the leaves in ``uses``, with one line for those that are in one place for one reason."""
    by_path = {leaf.path: leaf for leaf in leaves}
    reasons = {path: (by_path[path].mpmd_idxs, *map(_groups_using, uses[path])) for path in uses}
    rows = []
    for name, paths in gather({path: reasons.get(path) for path in by_path}):
        if paths[0] in uses:
            nbytes = sum(by_path[path].aval.nbytes for path in paths)
            columns = zip(*(uses[path] for path in paths), strict=True)
            tasks = [_tasks(itertools.chain.from_iterable(column)) for column in columns]
            place = _numbers(by_path[paths[0]].mpmd_idxs)
            rows.append((name, str(len(paths)), human_bytes(nbytes), place, *tasks))
    return table(header, rows)


def _groups_using(uses: Iterable[Use]) -> frozenset[tuple[int, bool]]:
    return frozenset((use.mpmd_idx, use.in_loop) for use in uses)


def _shared_table(leaves: Sequence[Leaf]) -> str:
    header = ("shared weight", "gradients accumulated by", "added by", "sent to groups")
    rows = []
    for leaf in leaves:
        if leaf.input and leaf.output and any(use.in_loop for use in leaf.input.read_by):
            parts = [use for use in leaf.output.tasks if use.in_loop]
            if len(parts) > 1:
                made_by, sent_to = _tasks(leaf.output.made_by), _numbers(leaf.output.sent_to)
                rows.append((leaf.input.path, _tasks(parts), made_by, sent_to))
    return table(header, rows)


def _edge_table(edges: Sequence[Edge]) -> str:
    """Has one line for values that are alike, and for all groups that get them from one group."""
    header = ("groups", "values", "bytes", "per step", "type", "sent by", "read by", "made at")
    receivers: dict[Any, list[int]] = collections.defaultdict(list)
    for edge in edges:
        alike = collections.Counter((value.aval.nbytes, _sent_cells(value)) for value in edge.values)
        for (nbytes, cells), number in alike.items():
            receivers[edge.src, number, nbytes, cells].append(edge.dst)
    rows = [
        (f"{src} to {_numbers(dsts)}", str(number), human_bytes(number * nbytes), *cells)
        for (src, number, nbytes, cells), dsts in receivers.items()
    ]
    return table(header, rows)


def _sent_cells(value: Sent) -> tuple[str, ...]:
    readers = dict.fromkeys((*(use.task for use in value.read_by), *value.kept_as))
    lines = few(map(str, value.made_by.lines))
    return f"x {value.count}", str(value.aval), value.made_by.task, few(readers), lines


def _task_table(tasks: Sequence[TaskSummary]) -> str:
    """Has one line for tasks that are alike."""
    header = ("task", "on groups", "per step", "equations", "operations", "takes", "makes", "functions")
    alike: dict[tuple[str, ...], list[TaskSummary]] = collections.defaultdict(list)
    for task in tasks:
        alike[_task_cells(task)].append(task)
    rows = [
        (few(dict.fromkeys(task.task for task in same)), _numbers([task.mpmd_idx for task in same]), *cells)
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
        ", ".join([*shares, "…"] if len(task.functions) > len(large) else shares),
    )


def _function(line: Line | None) -> str:
    if line is None:
        return "treduce"
    return f"{line.function} ({line.callee or f'{PurePath(line.file).name}:{line.number}'})"


# Parts of texts.


def _tasks(uses: Iterable[Use]) -> str:
    """Tasks by the groups they are on, e.g. ``fwd_0, bwd_0 on 0; after_1 on 0..3``."""
    groups: dict[str, dict[int, None]] = collections.defaultdict(dict)
    for use in sorted(uses, key=lambda use: not use.in_loop):
        groups[use.task][use.mpmd_idx] = None
    tasks: dict[tuple[int, ...], list[str]] = collections.defaultdict(list)
    for task, mpmd_idxs in groups.items():
        tasks[tuple(mpmd_idxs)].append(task)
    if len(tasks) == 1:
        return ", ".join(groups)
    return "; ".join(f"{', '.join(names)} on {_numbers(idxs)}" for idxs, names in tasks.items())


def _use_lines(uses: Iterable[Use]) -> list[str]:
    """A line of text for each task and line of the user's program."""
    groups: dict[tuple[str, Line | None], list[int]] = collections.defaultdict(list)
    for use in uses:
        for line in use.lines or (None,):
            groups[use.task, line].append(use.mpmd_idx)
    return aligned(
        [(f"    {task}", f"on {_groups(idxs)}", str(line or "")) for (task, line), idxs in groups.items()]
    )


def _place(leaf: Input | Output) -> str:
    sharded = f", sharded {leaf.spec}" if leaf.spec and any(leaf.spec) else ""
    size = human_bytes(leaf.aval.nbytes)
    return f"{leaf.path}: {leaf.aval}, {size}, on {_groups(leaf.mpmd_idxs)}{sharded}"


def _groups(mpmd_idxs: Sequence[int]) -> str:
    if not mpmd_idxs:
        return "no group"
    return f"{'group' if len(mpmd_idxs) == 1 else 'groups'} {_numbers(mpmd_idxs)}"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(ranges(map(str, numbers)))
