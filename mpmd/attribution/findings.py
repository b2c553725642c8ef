"""Findings: sentences on a measured step, ordered by what the simulator says that each would save."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Mapping

from mpmd.attribution.alternatives import Alternative
from mpmd.attribution.attribution import Attribution
from mpmd.attribution.balance import Balance
from mpmd.attribution.model import StepModel, flight_times
from mpmd.attribution.scenarios import EQUAL_STAGES, OWN_CORES, Scenario, like_others, twice_as_fast
from mpmd.attribution.texts import (
    change_text,
    equal_stages_text,
    less_text,
    processor_text,
    task_text,
    time_text,
    types_text,
)
from mpmd.ir.plan import Cell, Edge, Task, with_slice
from mpmd.simulate.costs import types_of

LEAST_SHARE = 0.001
"""The share of a step that a finding saves at least."""

ALIKE_SHARE = 0.001
"""The shares of a step that differ by less than this are as large, for the order of findings."""

UNEVEN_SHARE = 0.02
"""The share of a step that equal stages save where stages are called uneven."""

CONSTANT_FACTOR = 1.5
"""From here on, a task's median over the mean of its kind is called slow, and not merely uneven."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fact about a measured step, and what to change it would save.

    Attributes:
      text: in plain words.
      cause: the cause of idle time, as in ``Causes``; ``"cores"`` for shared ones; ``"schedule"`` and
        ``"microbatches"`` for changes of these.
      saves_ns: the nanoseconds by which the step would be shorter, by simulation.
      share_saved: these by the length of the simulated step.
      operation: the number of the task that has most to do with it, or that waits most for it; -1 for none.
    """

    text: str
    cause: str
    saves_ns: int
    share_saved: float
    operation: int = -1

    def __str__(self) -> str:
        return self.text


def findings_of(
    model: StepModel,
    scenarios: tuple[Scenario, ...],
    alternatives: tuple[Alternative, ...],
) -> tuple[Finding, ...]:
    """The findings, those that save the most first.

    Of those that save alike, as far as their texts tell, other schedules come last: a larger change.
    """
    writer = _Writer(model, scenarios, alternatives)
    findings = [finding for finding in writer.all() if finding.share_saved >= LEAST_SHARE]
    return tuple(sorted(findings, key=_rank))


def _rank(finding: Finding) -> tuple[int, bool, int]:
    is_other_step = finding.cause in ("schedule", "microbatches")
    return -round(finding.share_saved / ALIKE_SHARE), is_other_step, -finding.saves_ns


_Sentence = tuple[str, int]
"""A sentence, and the operation of ``Finding``."""


@dataclasses.dataclass(frozen=True)
class _Writer:
    model: StepModel
    scenarios: tuple[Scenario, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def attribution(self) -> Attribution:
        return self.model.attribution

    def all(self) -> Iterator[Finding]:
        by_name = {scenario.name: scenario for scenario in self.scenarios}
        whole = by_name["measured"].makespan or 1
        texts = {
            EQUAL_STAGES: self._imbalance,
            "no jitter": self._jitter,
            "no handling": self._handling,
            "outside work divided": self._outside,
            "arguments at once": self._late_begin,
            "no driver": self._driver,
        }
        for name, text in texts.items():
            scenario = by_name[name]
            share = scenario.saves / whole
            sentence, operation = text(less_text(share))
            yield Finding(sentence, scenario.cause, scenario.saves, share, operation)
        if apart := by_name.get(OWN_CORES):
            share = apart.saves / whole
            yield Finding(self._cores(less_text(share)), apart.cause, apart.saves, share)
        yield from self._links(by_name, whole)
        yield from self._schedules(whole)

    def _imbalance(self, less: str) -> _Sentence:
        """The group with the most work in loops, and its slowest type of task."""
        balance = balance_of(self.attribution)
        if not balance.loads:
            return f"there is no work in loops; {equal_stages_text(less)}", -1
        group = balance.heaviest
        text = f"group {group} has {balance.factor(group):.2f} times the work of the mean group"
        slowest, slowness, operation = self._slowest_type(group)
        if slowness >= CONSTANT_FACTOR:
            why = processor_text(self.attribution.measured, operation)
            note = f" ({why})" if why else ""
            text += f", and {slowest} takes {slowness:.1f} times the mean of all stages{note}"
        return f"{text}; {equal_stages_text(less)}", operation

    def _slowest_type(self, group: int) -> tuple[str, float, int]:
        """A group's type of task that most exceeds the mean of its kind, the factor, and one such task."""
        workload, equal_times = self.attribution.measured.workload, self.attribution.ideal.durations
        slowest, most, example = "", 0.0, -1
        for operation in workload.operations(group):
            task, equal = workload.tasks[operation], equal_times[operation]
            if isinstance(task, Cell) and equal:
                factor = workload.durations[operation] / equal
                if factor > most:
                    most, example = factor, operation
                    slowest = with_slice(types_text(types_of(task)), task, self.attribution.measured.loops)
        return slowest, most, example

    def _jitter(self, less: str) -> _Sentence:
        measured, operation = self.attribution.measured, self._worst("jitter")
        if operation < 0:
            text = f"tasks take longer at some times than at others; without that the step would take {less}"
            return text, -1
        duration = measured.duration(operation)
        factor = duration / (measured.workload.durations[operation] or 1)
        where = task_text(self.attribution, operation)
        why = processor_text(measured, operation)
        note = f"; {why}" if why else ""
        text = (
            f"{where} took {factor:.1f} times its median ({time_text(duration)}{note}); without such tasks "
            f"the step would take {less}"
        )
        return text, operation

    def _handling(self, less: str) -> _Sentence:
        idle = sum(map(self.attribution.measured.idle, self._groups))
        share = self.attribution.total.handling / (idle or 1)
        text = (
            f"{share:.0%} of the idle time is between tasks: executables are called, messages taken in and "
            f"handed over; without it the step would take {less}"
        )
        return text, self._worst("handling")

    def _outside(self, less: str) -> _Sentence:
        operation = self._worst("outside")
        where = f", most of all by {task_text(self.attribution, operation)}" if operation >= 0 else ""
        text = f"groups wait for work outside the loops{where}; divided evenly the step would take {less}"
        return text, operation

    def _late_begin(self, less: str) -> _Sentence:
        measured = self.attribution.measured
        late = {group: measured.began(group) - measured.received[group] for group in self._groups}
        group = max(late, key=late.__getitem__)
        text = (
            f"group {group} had the step's arguments {time_text(late[group])} after its request; if all had "
            f"them at once the step would take {less}"
        )
        return text, next(measured.tasks(group), -1)

    def _driver(self, less: str) -> _Sentence:
        measured = self.attribution.measured
        received = {group: measured.received[group] for group in self._groups if any(measured.tasks(group))}
        last = max(received, key=received.__getitem__)
        first, latest = time_text(min(received.values())), time_text(received[last])
        reply = measured.returned - max(measured.ends[measured.final(group)] for group in self._groups)
        span = latest if first == latest else f"{first} to {latest}"
        text = f"requests reached the groups {span} after the call, group {last} last"
        if reply:
            text += f", and all replies were there {time_text(reply)} after the last was sent"
        return f"{text}; without that the step would take {less}", next(measured.tasks(last), -1)

    def _cores(self, less: str) -> str:
        """The number of groups, and how much longer their tasks take than each alone."""
        measured, model = self.attribution.measured, self.model
        tasks = [task for group in self._groups for task in measured.tasks(group)]
        groups = sum(any(measured.tasks(group)) for group in self._groups)
        alone = sum(model.durations[task] for task in tasks)
        factor = sum(map(measured.duration, tasks)) / (alone or 1)
        return (
            f"{groups} groups share cores on which {measured.at_once:.3g} can compute at once, and their "
            f"tasks take {factor:.2f} times as long as alone; with cores for all the step would take {less}"
        )

    def _links(self, by_name: Mapping[str, Scenario], whole: int) -> Iterator[Finding]:
        flights = flight_times(self.attribution.measured)
        for edge, time in flights.items():
            if faster := by_name.get(twice_as_fast(edge)):
                like_median = by_name.get(like_others(edge))
                text = f"link {edge[0]} to {edge[1]}: twice as fast saves {faster.saves / whole:.1%}"
                if like_median:
                    others = statistics.median(flights[other] for other in flights if other != edge)
                    beside = f"{time / others:.1f} times those" if others else "and next to none"
                    text += (
                        f"; its messages take {time_text(time)}, {beside} of the other links: as fast as "
                        f"these the step would take {less_text(like_median.saves / whole)}"
                    )
                saves = (like_median or faster).saves
                yield Finding(text, "message", saves, saves / whole, self._slowest_reader(edge))

    def _slowest_reader(self, edge: Edge) -> int:
        """The task that a message of an edge was longest in flight for."""
        measured = self.attribution.measured
        receipts = [
            (receipt.arrived - max(measured.sent[receipt.message], receipt.start), operation)
            for operation, of_operation in enumerate(measured.receipts)
            for receipt in of_operation
            if measured.workload.edge(receipt.message) == edge
        ]
        return max(receipts, default=(0, -1))[1]

    def _schedules(self, whole: int) -> Iterator[Finding]:
        """The best other schedule, the best without more memory, and the better number of microbatches."""
        num_microbatches = max((task.microbatch for task in self._members()), default=0) + 1
        others = [
            each
            for each in self.alternatives
            if each.num_microbatches == num_microbatches
            and (each.num_stages == self._num_stages() or not self._is_uneven(whole))
        ]
        frugal = [each for each in others if each.extra_bytes is not None and each.extra_bytes <= 0]
        for best in dict.fromkeys([*others[:1], *frugal[:1]]):
            share = best.saves / whole
            stages = "" if best.num_stages == self._num_stages() else f" of {best.num_stages} stages"
            text = f"the schedule {best.schedule}{stages} with these times: {change_text(share, best)}"
            yield Finding(text, "schedule", best.saves, share)
        for best in [each for each in self.alternatives if each.num_microbatches != num_microbatches][:1]:
            share = best.saves / whole
            size = "half" if best.num_microbatches > num_microbatches else "twice"
            text = (
                f"{best.num_microbatches} microbatches of {size} the size, if tasks take {size} the time: "
                f"{change_text(share, best)}"
            )
            yield Finding(text, "microbatches", best.saves, share)

    def _is_uneven(self, whole: int) -> bool:
        """Whether equal stages come first: to cut a model into other stages takes equal ones for granted."""
        equal = next((each for each in self.scenarios if each.name == EQUAL_STAGES), None)
        return equal is not None and equal.saves > UNEVEN_SHARE * whole

    @property
    def _groups(self) -> range:
        return self.attribution.measured.groups

    def _members(self) -> Iterator[Task]:
        tasks = self.attribution.measured.workload.tasks
        return (member for task in tasks if isinstance(task, Cell) for member in task.tasks)

    def _num_stages(self) -> int:
        return 1 + max((task.stage for task in self._members()), default=0)

    def _worst(self, cause: str) -> int:
        """The operation that has the most of a cause in all gaps together; -1 for none."""
        blamed: collections.Counter[int] = collections.Counter()
        for gap in self.attribution.gaps:
            for culprit in gap.culprits:
                if culprit.cause == cause:
                    blamed[culprit.operation] += culprit.nanoseconds
        return blamed.most_common(1)[0][0] if blamed else -1


def balance_of(attribution: Attribution) -> Balance:
    """The balance of the times of tasks in loops, by their medians."""
    measured = attribution.measured
    workload = measured.workload
    loads = {
        group: sum(
            workload.durations[i] for i in measured.tasks(group) if isinstance(workload.tasks[i], Cell)
        )
        for group in measured.groups
    }
    return Balance({group: load for group, load in loads.items() if load})
