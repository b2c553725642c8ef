"""Reports the needs of a compiled step, and the seconds of compiling."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from mpmd.attribution.findings import Finding
from mpmd.explanation.explanation import findings_text
from mpmd.ir.part import Part, part_lines
from mpmd.ir.plan import Edge, Executable, LoopStages, Plan, cut_lines, loop_lines, with_slice
from mpmd.ir.routes import Routes, Topology
from mpmd.memory import GroupMemory, Holding, device_bytes, group_memories
from mpmd.profile.profile import Profile
from mpmd.profile.text import findings_lines
from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import aligned, human_bytes
from mpmd.verify import Verified


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """The tasks and the needs of one group in a step.

    Attributes:
      submesh: the sizes of the axes of the group's devices.
      tasks: the number of tasks that the group runs in one step.
      executables: the executables among them, each of which is compiled once and has its ``memory``.
      parameter_bytes: the bytes, on each device, of the group's arguments that the step returns updated:
        weights and optimizer state; 0 for a step that updates nothing.
      memory: the need of each device: values under their shardings, XLA's temporaries, and messages.
      devices_per_process: the devices of the group that one of its processes has.
      measured_peak_bytes: the most bytes that were ever allocated on one of the devices since their processes
        started, by any step; ``None`` where the allocator does not count them, as on CPUs.
      sent_bytes: the bytes that go from the group to other groups in one step.
      process_sent_bytes: the bytes that each of the group's processes sends to other groups. Collective
        operations within the group do not count.
      xla_seconds: how long XLA took to compile the executables; groups compile at the same time. ``None``
        for a step that is only planned.
    """

    mpmd_idx: int
    submesh: Mapping[str, int]
    tasks: int
    executables: tuple[Executable, ...]
    parameter_bytes: int
    memory: GroupMemory
    devices_per_process: int
    measured_peak_bytes: int | None
    sent_bytes: int
    process_sent_bytes: tuple[int, ...]
    xla_seconds: float | None

    @property
    def peak_bytes(self) -> int:
        """The most bytes that each device needs at once."""
        return self.memory.peak_bytes

    @property
    def process_bytes(self) -> int:
        """The most bytes that the devices of one of the group's processes need at once."""
        return self.devices_per_process * self.peak_bytes


@dataclasses.dataclass(frozen=True, repr=False)
class Report(ShownAsText):
    """The tasks and the needs of each group, and the seconds of compiling; ``str(report)`` is three tables.

    Attributes:
      groups: the tasks and the needs of each group.
      executables: the number of executables of all groups, each counted once.
      seconds: how long each pass took; their sum is the time of compiling. ``jax`` is JAX's tracing of the
        step, and ``trace`` is the compiler's pass over the traced step; ``split``, ``shard``, ``place``,
        ``lower`` and ``verify`` are the further passes of the compiler. ``export`` makes the executables
        ready for other processes, if there are any. ``load`` ends when the last group has compiled its
        executables; where shardings are left to the groups' compiler, the groups have compiled before, in
        ``resolve``.
      are_specs_open: whether shardings are left to the groups' compilers, which have not chosen them: their
        values count as replicated.
      findings: facts that the user probably did not intend, as in ``mpmd.explain``.
      loops: the stages of each loop, shown if there are several loops; and where stages end that
        ``mpmd.auto_marks`` has cut.
      part: the part of the mesh that runs the step; ``None``: the whole mesh.
      profile: the last profile of the step, without its result, if there is one. Its first three findings
        are shown.
    """

    groups: tuple[GroupReport, ...]
    executables: int
    seconds: Mapping[str, float]
    are_specs_open: bool = False
    findings: tuple[str, ...] = ()
    loops: tuple[LoopStages, ...] = ()
    part: Part | None = None
    profile: Profile | None = dataclasses.field(default=None, compare=False)

    @property
    def profile_findings(self) -> tuple[Finding, ...]:
        """The findings of the step's last profile, the largest saving first; empty without a profile.

        They are simulated when they are first asked for, also by ``str(report)``.
        """
        return self.profile.findings if self.profile else ()

    def __str__(self) -> str:
        compiled = any(group.xla_seconds is not None for group in self.groups)
        header = ("group", "tasks", "executables", "sent per step", *(["XLA compile"] if compiled else []))
        rows = [
            (
                self._label(g),
                str(g.tasks),
                str(len(g.executables)),
                _sent_text(g),
                *([f"{g.xla_seconds or 0:.2f} s"] if compiled else []),
            )
            for g in self.groups
        ]
        passes = {**self.seconds, "total": sum(self.seconds.values())}
        return "\n".join(
            [
                *part_lines(self.part),
                *loop_lines(self.loops),
                *cut_lines(self.loops),
                *aligned([header, *rows], left=()),
                f"{self.executables} different executables in all",
                "memory of each device at its peak:",
                *self._memory_table(),
                *([_OPEN] if self.are_specs_open else []),
                f"{'compiled' if compiled else 'planned'} in seconds:",
                *aligned([list(passes), [f"{seconds:.2f}" for seconds in passes.values()]], left=()),
                *filter(None, [findings_text(self.findings)]),
                *findings_lines("what would help, by simulation of the last profile:", self.profile_findings),
            ]
        )

    def _memory_table(self) -> list[str]:
        fields = [field.name for field in dataclasses.fields(self.groups[0].memory.peak)]
        columns = [field for field in fields if any(getattr(g.memory.peak, field) != 0 for g in self.groups)]
        measured = any(group.measured_peak_bytes is not None for group in self.groups)
        header = ["group", "peak", *(["measured"] if measured else []), *columns, "during"]
        rows = []
        for group in self.groups:
            parts = [human_bytes(getattr(group.memory.peak, column), "not compiled") for column in columns]
            allocated = [human_bytes(group.measured_peak_bytes)] if measured else []
            task = group.memory.task
            during = with_slice(str(task), task, self.loops) if task else "no task"
            rows.append([self._label(group), human_bytes(group.peak_bytes), *allocated, *parts, during])
        return aligned([header, *rows], left=())

    def _label(self, group: GroupReport) -> str:
        if all(other.submesh == group.submesh for other in self.groups):
            return str(group.mpmd_idx)
        return " ".join([f"{group.mpmd_idx}:", *(f"{axis} {size}" for axis, size in group.submesh.items())])


_OPEN = "shardings that XLA chooses when the step is compiled are not known: they count as replicated"


def _sent_text(group: GroupReport) -> str:
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
    xla_seconds: Mapping[int, float] | None = None,
    holdings: Mapping[Edge, Holding] | None = None,
    measured_peaks: Sequence[int | None] | None = None,
    findings: Sequence[str] = (),
    profile: Profile | None = None,
) -> Report:
    """Reports on a plan. The times of XLA, the places of messages and measured peaks need a loaded plan.

    Args:
      plan: with the memory that XLA needs for its executables, if groups have compiled them.
      verified: the plan's memory without XLA's temporaries.
      updated: the positions of the arguments that the step returns updated.
      xla_seconds: for each group that has loaded the step, the seconds of XLA's compiling.
      holdings: where the messages of each edge are until they are used; by default in the receiver's memory.
      measured_peaks: for each group, the most bytes that were allocated on one of its devices.
    """
    sent: collections.Counter[tuple[int, int]] = collections.Counter()
    for (source, _), by_processes in Routes(plan, topology).sent_bytes().items():
        for (process, _), count in by_processes.items():
            sent[source, process] += count
    sent_by = [
        tuple(sent[group, process] for process in range(shape.num_processes))
        for group, shape in enumerate(topology.groups)
    ]
    names = {leaf.name for i, leaf in enumerate(plan.inputs) if i in updated and leaf.name}
    memories = group_memories(plan, verified.arrivals, holdings, names)
    groups = tuple(
        GroupReport(
            mpmd_idx=group,
            submesh=plan.submesh(group),
            tasks=len(program.runs),
            executables=plan.executables_of(group),
            parameter_bytes=sum(
                device_bytes(leaf.aval, leaf.spec, plan.submesh(group))
                for i, leaf in plan.inputs_of(group).items()
                if i in updated
            ),
            memory=memories[group],
            devices_per_process=topology.groups[group].devices_per_process,
            measured_peak_bytes=measured_peaks[group] if measured_peaks else None,
            sent_bytes=sum(sent_by[group]),
            process_sent_bytes=sent_by[group],
            xla_seconds=xla_seconds.get(group) if xla_seconds else None,
        )
        for group, program in enumerate(plan.programs)
    )
    are_open = any(None in (*e.in_specs, *e.out_specs) for e in plan.executables)
    return Report(
        groups=groups,
        executables=len(plan.executables),
        seconds=seconds,
        are_specs_open=are_open,
        findings=tuple(findings),
        loops=plan.loops,
        part=plan.part,
        profile=profile,
    )
