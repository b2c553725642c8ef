"""What a compiled step needs, and what compiling it took: tables for people, and numbers for programs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

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
      xla_seconds: how long XLA compiled the executables; groups compile at the same time.
    """

    mpmd_idx: int
    tasks: int
    executables: int
    parameter_bytes: int
    peak_bytes: int
    sent_bytes: int
    xla_seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What each group does and needs, and how long compiling took; ``str(report)`` is two tables.

    Attributes:
      executables: the different ones of all groups.
      seconds: how long each pass took; together, the time it took to compile. ``jax`` is the step itself,
        traced by JAX; ``trace`` what the compiler does then; ``split``, ``place``, ``lower`` and ``verify``
        are its other passes; ``resolve`` asks the groups' compiler for the shardings left to it; ``export``
        makes the executables ready for other processes, if there are any; ``load`` is until the last group
        has compiled its own.
    """

    groups: tuple[GroupReport, ...]
    executables: int
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        header = ("group", "tasks", "executables", "parameters", "peak live", "sent per step", "XLA compile")
        rows = [
            (
                str(g.mpmd_idx),
                str(g.tasks),
                str(g.executables),
                human_bytes(g.parameter_bytes),
                human_bytes(g.peak_bytes),
                human_bytes(g.sent_bytes),
                f"{g.xla_seconds:.2f} s",
            )
            for g in self.groups
        ]
        passes = {**self.seconds, "total": sum(self.seconds.values())}
        return "\n".join(
            [
                _table([header, *rows]),
                f"{self.executables} different executables in all",
                "compiled in seconds:",
                _table([list(passes), [f"{seconds:.2f}" for seconds in passes.values()]]),
            ]
        )


def report(
    plan: Plan,
    verified: Verified,
    fed_back: Collection[int],
    seconds: Mapping[str, float],
    xla_seconds: Sequence[float],
) -> Report:
    """Sums up a plan that was loaded.

    Args:
      fed_back: the positions of the arguments that the step returns updated.
      seconds: how long each pass took.
      xla_seconds: for each group, how long XLA took.
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
                xla_seconds[program.mpmd_idx],
            )
        )
    return Report(tuple(groups), len(plan.executables), seconds)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def human_bytes(count: float) -> str:
    """A number of bytes for people, e.g. ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
