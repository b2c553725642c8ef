"""The result of ``mpmd.explain``: data for programs, which prints as text for people."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from mpmd.explanation.leaves import (
    InputSummary,
    LeafSummary,
    OutputSummary,
    argument_table,
    result_table,
    shared_table,
)
from mpmd.explanation.tasks import TaskSummary, task_table
from mpmd.explanation.traffic import EdgeTraffic, edge_table
from mpmd.ir.part import Part, part_lines
from mpmd.ir.plan import LoopStages, cut_lines, loop_lines
from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import first_few
from mpmd.validation import raise_faults, str_fault

_RULE = """\
An argument is on the groups whose tasks read it. A result is on the groups that compute it, or on those of
the argument whose place it takes in a next step. Without a loop, arguments stay on their groups, and results
stay on the groups that hold their inputs. Bytes of arguments, results and tasks are those on each device;
values that are sent count with the bytes that travel."""


def findings_text(findings: Sequence[str]) -> str:
    return "\n".join(["look at this:", *(f"  - {text}" for text in findings)]) if findings else ""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(ShownAsText):
    """The groups of all values of a step, with the reasons. ``str(explanation)`` is an overview.

    ``findings`` are sentences on facts that the user probably did not intend: a group with most of the work,
    or without a backward, or a value that is sent again and again. ``loops`` have the stages of each loop,
    since stages are numbered through all loops. ``part`` is the part of the mesh for which the step is
    compiled. ``choices`` are sentences on the discrete choices that forwards keep for their backwards.
    """

    inputs: tuple[InputSummary, ...]
    outputs: tuple[OutputSummary, ...]
    edges: tuple[EdgeTraffic, ...]
    tasks: tuple[TaskSummary, ...]
    findings: tuple[str, ...]
    loops: tuple[LoopStages, ...] = ()
    part: Part | None = None
    choices: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[LeafSummary, ...]:
        """All arguments, then the results that take the place of no argument."""
        by_path = {leaf.path: leaf for leaf in self.outputs}
        arguments = (LeafSummary(leaf, by_path.get(leaf.updated or "")) for leaf in self.inputs)
        return (*arguments, *(LeafSummary(None, leaf) for leaf in self.outputs if leaf.updates is None))

    def leaf(self, path: str) -> LeafSummary:
        """One argument or result.

        Args:
          path: the name of the leaf or a part of the name, e.g. ``params['w']``.

        Raises: ``ValueError`` when no name has this part, or the names of several leaves.
        """
        raise_faults(str_fault("path", path))
        leaves = {name: leaf for leaf in self.leaves for name in leaf.paths}
        if path in leaves:
            return leaves[path]
        matches = dict.fromkeys(leaf for name, leaf in leaves.items() if path in name)
        if len(matches) == 1:
            return next(iter(matches))
        if matches:
            several = [leaf.paths[0] for leaf in matches]
            raise ValueError(
                f"{len(several)} leaves have {path} in their names; say more: {first_few(several, 8)}"
            )
        close = difflib.get_close_matches(path, leaves, n=5, cutoff=0.3)
        raise ValueError(f"no leaf has {path} in its name; close ones: {', '.join(close) or 'none'}")

    def __str__(self) -> str:
        tables = (
            argument_table(self.leaves),
            result_table(self.outputs),
            shared_table(self.leaves, self.loops),
            edge_table(self.edges),
            task_table(self.tasks),
        )
        loops = "\n".join([*part_lines(self.part), *loop_lines(self.loops), *cut_lines(self.loops)])
        return "\n\n".join(
            [
                _RULE,
                *([loops] if loops else []),
                *filter(None, tables),
                *(["\n".join(self.choices)] if self.choices else []),
                *filter(None, [findings_text(self.findings)]),
            ]
        )
