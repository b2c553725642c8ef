"""Reports what a compiled step needs, and how long compiling took."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from mpmd.ir import Plan
from mpmd.routes import Routes, Topology
from mpmd.tables import aligned, human_bytes
from mpmd.verify import Verified


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """What one group does and needs in a step. Bytes are of whole logical values, over all devices.

    Attributes:
      submesh: the sizes of the axes of the group's devices.
      tasks: the number of tasks that the group runs in one step.
      executables: the number of different executables among them, each of which is compiled once.
      parameter_bytes: the bytes of the group's arguments that the step returns updated: weights and optimizer
        state; 0 for a step that updates nothing.
      peak_bytes: the most bytes of values that the group holds at once.
      sent_bytes: the bytes that go from the group to other groups in one step.
      process_sent_bytes: those that each of the group's processes sends. What processes of one group
        exchange, as they do in collective operations, is not counted.
      xla_seconds: how long XLA took to compile the executables; groups compile at the same time.
    """

    mpmd_idx: int
    submesh: Mapping[str, int]
    tasks: int
    executables: int
    parameter_bytes: int
    peak_bytes: int
    sent_bytes: int
    process_sent_bytes: tuple[int, ...]
    xla_seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What each group does and needs, and how long compiling took; ``str(report)`` is two tables.

    Attributes:
      groups: what each group does and needs.
      executables: the number of different executables of all groups.
      seconds: how long each pass took; their sum is the time of compiling. ``jax`` is JAX's tracing of the
        step, and ``trace`` is what the compiler does with it; ``split``, ``shard``, ``place``, ``lower`` and
        ``verify`` are the other passes of the compiler. ``export`` makes the executables ready for other
        processes, if there are any. ``load`` ends when the last group has compiled its executables; where
        shardings are left to the groups' compiler, the groups have compiled before, in ``resolve``.
    """

    groups: tuple[GroupReport, ...]
    executables: int
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        header = ("group", "tasks", "executables", "parameters", "peak live", "sent per step", "XLA compile")
        rows = [
            (
                self._label(g),
                str(g.tasks),
                str(g.executables),
                human_bytes(g.parameter_bytes),
                human_bytes(g.peak_bytes),
                _sent_text(g),
                f"{g.xla_seconds:.2f} s",
            )
            for g in self.groups
        ]
        passes = {**self.seconds, "total": sum(self.seconds.values())}
        return "\n".join(
            [
                *aligned([header, *rows], left=()),
                f"{self.executables} different executables in all",
                "compiled in seconds:",
                *aligned([list(passes), [f"{seconds:.2f}" for seconds in passes.values()]], left=()),
            ]
        )

    def _label(self, group: GroupReport) -> str:
        """A group's number, and its submesh where groups differ."""
        if all(other.submesh == group.submesh for other in self.groups):
            return str(group.mpmd_idx)
        return " ".join([f"{group.mpmd_idx}:", *(f"{axis} {size}" for axis, size in group.submesh.items())])


def _sent_text(group: GroupReport) -> str:
    """The bytes that a group sends, and the most that one of several processes sends."""
    total = human_bytes(group.sent_bytes)
    if len(group.process_sent_bytes) == 1:
        return total
    return f"{total}, {human_bytes(max(group.process_sent_bytes))} by a process"


def report(
    plan: Plan,
    topology: Topology,
    verified: Verified,
    updated: Collection[int],
    seconds: Mapping[str, float],
    xla_seconds: Sequence[float],
) -> Report:
    """Reports on a plan that was loaded.

    Args:
      topology: of the mesh that has loaded it.
      updated: the positions of the arguments that the step returns updated.
      seconds: how long each pass took.
      xla_seconds: for each group, how long XLA took.
    """
    sent: collections.Counter[tuple[int, int]] = collections.Counter()
    for (source, _), by_processes in Routes(plan, topology).sent_bytes().items():
        for (process, _), count in by_processes.items():
            sent[source, process] += count
    sent_by = [
        tuple(sent[group, process] for process in range(shape.num_processes))
        for group, shape in enumerate(topology.groups)
    ]
    groups = tuple(
        GroupReport(
            mpmd_idx=program.mpmd_idx,
            submesh=plan.submesh(program.mpmd_idx),
            tasks=len(program.runs),
            executables=len(plan.executables_of(program.mpmd_idx)),
            parameter_bytes=sum(
                leaf.aval.nbytes for i, leaf in plan.inputs_of(program.mpmd_idx).items() if i in updated
            ),
            peak_bytes=verified.peak_bytes[program.mpmd_idx],
            sent_bytes=sum(sent_by[program.mpmd_idx]),
            process_sent_bytes=sent_by[program.mpmd_idx],
            xla_seconds=xla_seconds[program.mpmd_idx],
        )
        for program in plan.programs
    )
    return Report(groups, len(plan.executables), seconds)
