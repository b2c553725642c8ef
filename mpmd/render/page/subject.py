"""The profile that a page is about."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from mpmd.attribution.analysis import Analysis
from mpmd.attribution.attribution import Attribution
from mpmd.attribution.measured import Measured, TypeKey, type_of, types_of_operations
from mpmd.attribution.memory import MemoryOverTime
from mpmd.ir.plan import AnyTask
from mpmd.simulate.workload import Instant
from mpmd.util.grouping import grouped


@dataclasses.dataclass(frozen=True)
class Subject:
    """A profile as a page shows it.

    Attributes:
      name: the name of the step in headings.
      analysis: the recorded steps, the causes of idle time, the findings and the scenarios.
      sources: for each executable, the user's functions with their lines; the largest first.
      memory: of each group in the measured step.
    """

    name: str
    analysis: Analysis
    sources: Mapping[str, tuple[str, ...]]
    compile_seconds: Mapping[str, float]
    memory: Sequence[MemoryOverTime]

    @property
    def attribution(self) -> Attribution:
        return self.analysis.attribution

    @property
    def measured(self) -> Measured:
        return self.attribution.measured

    @functools.cached_property
    def tasks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.measured.tasks(group)) for group in self.measured.groups)

    @property
    def whole(self) -> int:
        """The nanoseconds of all groups together: their tasks, and their idle time by cause."""
        return self.measured.returned * len(self.tasks)

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """For each operation, the number of its task, or else of the task before it; -1 without a task.

        An operation that is no task, such as a wait before a send, is shown as the task before it.
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
        return self.numbers[operation] if operation >= 0 else -1

    def task(self, operation: int) -> AnyTask:
        task = self.measured.workload.tasks[operation]
        assert not isinstance(task, Instant), "operations of tasks are no instants"
        return task

    @functools.cached_property
    def types(self) -> Mapping[TypeKey, Sequence[int]]:
        """The operations of each type of task, by group and first start."""
        keys = enumerate(types_of_operations(self.measured.workload))
        return grouped((key, operation) for operation, key in keys if key is not None)

    @functools.cached_property
    def places(self) -> Mapping[int, int]:
        """The place of each task's type among ``types``, by the task's operation."""
        return {i: place for place, of_type in enumerate(self.types.values()) for i in of_type}

    @functools.cached_property
    def executables(self) -> Mapping[TypeKey, str]:
        return {
            type_of(program.mpmd_idx, run.task): run.executable
            for program in self.analysis.plan.programs
            for run in program.runs
        }

    def sources_of(self, key: TypeKey) -> list[str]:
        return list(self.sources.get(self.executables[key], ()))

    def median(self, operation: int) -> int:
        """The median time of an operation's type over all recorded steps."""
        return int(self.measured.workload.durations[operation])
