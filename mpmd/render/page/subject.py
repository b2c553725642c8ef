"""The profile that a page is about."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.clocks import MatchedStep
from mpmd.attribution.findings import Finding
from mpmd.attribution.measured import Measured, TypeKey, type_of
from mpmd.attribution.scenarios import Scenario
from mpmd.ir.plan import AnyTask, Plan
from mpmd.memory import MemoryParts
from mpmd.simulate.workload import Instant


class GroupMemory(Protocol):
    """The bytes that each device of a group holds: ``parts[i]`` from ``times[i]`` on."""

    @property
    def times(self) -> Sequence[int]:
        """In nanoseconds since the driver's call, ascending."""

    @property
    def parts(self) -> Sequence[MemoryParts]:
        """By purpose."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A profile as a page shows it.

    Attributes:
      name: the name of the step in headings.
      attribution: the measured step and the causes of its idle time.
      step: the recorded step that is measured, by process.
      findings, scenarios: of the step, in the order in which they are shown.
      sources: for each executable, the user's functions with their lines; the largest first.
      compile_seconds: the time of each phase of compiling.
      memory: of each group in the measured step; empty: unknown.
      recoveries: by the number of a recorded step, the nanoseconds in which groups were replaced.
    """

    name: str
    plan: Plan
    step: MatchedStep
    attribution: Attribution
    findings: Sequence[Finding]
    scenarios: Sequence[Scenario]
    sources: Mapping[str, tuple[str, ...]]
    compile_seconds: Mapping[str, float]
    memory: Sequence[GroupMemory] = ()
    recoveries: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def measured(self) -> Measured:
        """The measured step."""
        return self.attribution.measured

    @functools.cached_property
    def tasks(self) -> tuple[tuple[int, ...], ...]:
        """The operations of each group that are tasks."""
        return tuple(tuple(self.measured.tasks(group)) for group in self.measured.groups)

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """For each operation, the number of the task that it is or comes after; -1 without one.

        What is no task, such as a wait before a send, is shown as the task before it.
        """
        numbers, count = [], 0
        for group in self.measured.groups:
            before = -1
            for operation in self.measured.operations(group):
                if not isinstance(self.measured.workload.tasks[operation], Instant):
                    before, count = count, count + 1
                numbers.append(before)
        return tuple(numbers)

    def number(self, operation: int) -> int:
        """The number of an operation's task; -1 for no operation."""
        return self.numbers[operation] if operation >= 0 else -1

    def task(self, operation: int) -> AnyTask:
        """The task of an operation that is one."""
        task = self.measured.workload.tasks[operation]
        assert not isinstance(task, Instant), "operations of tasks are no instants"
        return task

    @functools.cached_property
    def types(self) -> Mapping[TypeKey, tuple[int, ...]]:
        """The operations of each type of task, by group and first start."""
        types: dict[TypeKey, list[int]] = {}
        for group, operations in enumerate(self.tasks):
            for operation in operations:
                types.setdefault(type_of(group, self.task(operation)), []).append(operation)
        return {key: tuple(operations) for key, operations in types.items()}

    @functools.cached_property
    def executables(self) -> Mapping[TypeKey, str]:
        """The executable of each type of task."""
        return {
            type_of(program.mpmd_idx, run.task): run.executable
            for program in self.plan.programs
            for run in program.runs
        }

    def median(self, operation: int) -> int:
        """The median time of an operation's type over all recorded steps."""
        return int(self.measured.workload.durations[operation])
