"""What a compiled step needs: a table for people, and its numbers for programs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection

from mpmd.ir import Plan, Run
from mpmd.verify import Verified


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """One group's share of a step; bytes are of whole logical values, over all devices of the group.

    Attributes:
      tasks: executables run in one step.
      executables: different ones among them, each compiled once.
      parameter_bytes: arguments held by the group that the step returns updated: weights and optimizer
        state; 0 for a step that updates nothing.
      peak_bytes: the most bytes of values held at once.
      sent_bytes: sent to other groups in one step.
    """

    mpmd_idx: int
    tasks: int
    executables: int
    parameter_bytes: int
    peak_bytes: int
    sent_bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What each group does and needs; ``str(report)`` is a table."""

    groups: tuple[GroupReport, ...]
    executables: int

    def __str__(self) -> str:
        header = ("group", "tasks", "executables", "parameters", "peak live", "sent per step")
        rows = [
            (
                str(g.mpmd_idx),
                str(g.tasks),
                str(g.executables),
                human_bytes(g.parameter_bytes),
                human_bytes(g.peak_bytes),
                human_bytes(g.sent_bytes),
            )
            for g in self.groups
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
        return "\n".join([*lines, f"{self.executables} different executables in all"])


def report(plan: Plan, verified: Verified, fed_back: Collection[int]) -> Report:
    """Sums up a plan.

    Args:
      fed_back: the positions of the arguments that the step returns updated.
    """
    sent: collections.Counter[int] = collections.Counter()
    for (source, _), count in verified.sent_bytes.items():
        sent[source] += count
    groups = []
    for program in plan.programs:
        runs = [i.executable for i in program.instructions if isinstance(i, Run)]
        held = [
            leaf.aval.nbytes
            for i, leaf in enumerate(plan.inputs)
            if i in fed_back and program.mpmd_idx in leaf.mpmd_idxs
        ]
        groups.append(
            GroupReport(
                program.mpmd_idx,
                len(runs),
                len(set(runs)),
                sum(held),
                verified.peak_bytes[program.mpmd_idx],
                sent[program.mpmd_idx],
            )
        )
    return Report(tuple(groups), len(plan.executables))


def human_bytes(count: float) -> str:
    """A number of bytes for people, e.g. ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
