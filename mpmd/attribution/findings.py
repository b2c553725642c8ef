"""Findings: sentences on a measured step, ordered by what the simulator says that each would save."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Mapping

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.model import StepModel
from mpmd.attribution.scenarios import Scenario, like_others, median_of_others, twice_as_fast
from mpmd.attribution.texts import less_text, processor_text, task_text, time_text, types_text
from mpmd.ir.plan import Cell, Edge

LEAST_SHARE = 0.001
"""The share of a step that a finding saves at least."""

LEAST_FILL = 0.05
"""The share of the groups' time from which on the fill of the schedule is a finding."""

LARGE_SHARE = 0.01
"""Findings that save at least this share of a step come before the finding on the schedule."""

CONSTANT_FACTOR = 1.5
"""From here on, a task's median over the mean of its kind is called slow, and not merely uneven."""

PLAN_CALL = "mpmd.plan(train_step, *arguments, cluster=mpmd.Cluster.from_ray(measure=True))"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fact about a measured step, and the time that a change would save.

    Attributes:
      text: a sentence for the user.
      cause: the cause of idle time, as in ``Causes``; ``"cores"`` for shared cores.
      saves_ns: the nanoseconds by which the simulated step is shorter after the change; 0 for ``"fill"``,
        which is not simulated.
      share_saved: ``saves_ns`` by the length of the simulated step.
      operation: the number of the slowest task behind the fact, or of the task that waits longest; -1 where
        the fact is about no task.
    """

    text: str
    cause: str
    saves_ns: int
    share_saved: float
    operation: int = -1

    def __str__(self) -> str:
        return self.text


def findings_of(model: StepModel, scenarios: tuple[Scenario, ...]) -> tuple[Finding, ...]:
    writer = _FindingWriter(model, {scenario.name: scenario for scenario in scenarios})
    findings = [finding for finding in writer.simulated() if finding.share_saved >= LEAST_SHARE]
    findings += writer.schedule()
    return tuple(sorted(findings, key=lambda finding: -(finding.share_saved or LARGE_SHARE)))


_Sentence = tuple[str, int]
"""A sentence up to the words "the step would take", and the operation of ``Finding``."""


@dataclasses.dataclass(frozen=True)
class _FindingWriter:
    model: StepModel
    scenarios: Mapping[str, Scenario]

    @property
    def attribution(self) -> Attribution:
        return self.model.attribution

    def simulated(self) -> Iterator[Finding]:
        whole = self.scenarios["measured"].makespan or 1
        writers = {
            "imbalance": self._imbalance,
            "jitter": self._jitter,
            "handling": self._handling,
            "outside": self._outside,
            "late_begin": self._late_begin,
            "driver": self._driver,
            "cores": self._cores,
        }
        for scenario in self.scenarios.values():
            share = scenario.saves / whole
            if share >= LEAST_SHARE and (write := writers.get(scenario.cause)):
                sentence, operation = write()
                text = f"{sentence} the step would take {less_text(share)}"
                yield Finding(text, scenario.cause, scenario.saves, share, operation)
        yield from self._links(whole)

    def schedule(self) -> Iterator[Finding]:
        measured = self.attribution.measured
        share = self.attribution.total.fill / (measured.returned * len(measured.groups) or 1)
        if share >= LEAST_FILL:
            text = (
                f"the schedule leaves groups idle for {share:.0%} of the step, with equal stages, too, while "
                f"its pipeline fills and drains; {PLAN_CALL} says which schedule and how many microbatches "
                "would take less"
            )
            yield Finding(text, "fill", 0, 0.0)

    def _imbalance(self) -> _Sentence:
        loads = loads_of(self.attribution)
        group = max(loads, key=loads.__getitem__)
        factor = loads[group] / statistics.fmean(loads.values())
        text = f"group {group} has {factor:.2f} times the work of the mean group"
        slowest, slowness, operation = self._slowest_type(group)
        if slowness >= CONSTANT_FACTOR:
            why = processor_text(self.attribution.measured, operation)
            note = f" ({why})" if why else ""
            text += f", and {slowest} takes {slowness:.1f} times the mean of all stages{note}"
        return f"{text}; with equal stages", operation

    def _slowest_type(self, group: int) -> tuple[str, float, int]:
        """Returns the type of task that most exceeds the mean of its kind, the factor, and one such task."""
        workload, equal_times = self.attribution.measured.workload, self.attribution.ideal.durations
        slowest, most, example = "", 0.0, -1
        for operation in workload.operations(group):
            task, equal = workload.tasks[operation], equal_times[operation]
            if isinstance(task, Cell) and equal:
                factor = workload.durations[operation] / equal
                if factor > most:
                    most, example = factor, operation
                    slowest = types_text(self.attribution.measured, task)
        return slowest, most, example

    def _jitter(self) -> _Sentence:
        measured, operation = self.attribution.measured, self._worst("jitter")
        if operation < 0:
            return "tasks take longer at some times than at others; without that", -1
        duration = measured.durations[operation]
        factor = duration / (measured.workload.durations[operation] or 1)
        where = task_text(measured, operation)
        why = processor_text(measured, operation)
        note = f"; {why}" if why else ""
        took = f"{where} took {factor:.1f} times its median ({time_text(duration)}{note})"
        return f"{took}; without such tasks", operation

    def _handling(self) -> _Sentence:
        idle = sum(map(self.attribution.measured.idle, self._groups))
        between = self.attribution.total.handling / (idle or 1)
        text = (
            f"{between:.0%} of the idle time is between tasks: executables are called, messages taken in and "
            "handed over; without it"
        )
        return text, self._worst("handling")

    def _outside(self) -> _Sentence:
        measured, operation = self.attribution.measured, self._worst("outside")
        where = f", most of all by {task_text(measured, operation)}" if operation >= 0 else ""
        return f"groups wait for work outside the loops{where}; divided evenly", operation

    def _late_begin(self) -> _Sentence:
        measured = self.attribution.measured
        late = {group: measured.began(group) - measured.received[group] for group in self._groups}
        group = max(late, key=late.__getitem__)
        text = (
            f"group {group} had the step's arguments {time_text(late[group])} after its request; if all had "
            "them at once"
        )
        return text, next(measured.tasks(group), -1)

    def _driver(self) -> _Sentence:
        measured = self.attribution.measured
        running = [group for group in self._groups if any(measured.tasks(group))]
        received = {group: measured.received[group] for group in running or self._groups}
        last = max(received, key=received.__getitem__)
        first, latest = time_text(min(received.values())), time_text(received[last])
        reply = measured.returned - measured.makespan
        span = latest if first == latest else f"{first} to {latest}"
        text = f"requests reached the groups {span} after the call, group {last} last"
        if reply:
            text += f", and all replies were there {time_text(reply)} after the last was sent"
        return f"{text}; without that", next(measured.tasks(last), -1)

    def _cores(self) -> _Sentence:
        measured, model = self.attribution.measured, self.model
        tasks = [task for group in self._groups for task in measured.tasks(group)]
        groups = sum(any(measured.tasks(group)) for group in self._groups)
        alone = sum(model.durations[task] for task in tasks)
        factor = sum(measured.durations[task] for task in tasks) / (alone or 1)
        text = (
            f"{groups} groups share cores on which {measured.at_once:.3g} can compute at once, and their "
            f"tasks take {factor:.2f} times as long as alone; with cores for all"
        )
        return text, -1

    def _links(self, whole: int) -> Iterator[Finding]:
        flights = self.model.flights
        for edge, time in flights.items():
            if not (faster := self.scenarios.get(twice_as_fast(edge))):
                continue
            text, saves = (
                f"link {edge[0]} to {edge[1]}: twice as fast saves {faster.saves / whole:.1%}",
                faster.saves,
            )
            if like_median := self.scenarios.get(like_others(edge)):
                median, saves = median_of_others(flights, edge), like_median.saves
                beside = f"{time / median:.1f} times those" if median else "and next to none"
                text += (
                    f"; its messages take {time_text(time)}, {beside} of the other links: as fast as "
                    f"these the step would take {less_text(saves / whole)}"
                )
            yield Finding(text, "message", saves, saves / whole, self._slowest_reader(edge))

    def _slowest_reader(self, edge: Edge) -> int:
        """Returns the task for which a message of an edge was longest in flight."""
        measured, readers = self.attribution.measured, self.attribution.measured.workload.messages.readers
        flights = (
            (measured.arrivals[message] - max(measured.sent[message], measured.asked[message]), reader)
            for message, reader in enumerate(readers)
            if measured.workload.edge(message) == edge
        )
        return max(flights)[1]

    @property
    def _groups(self) -> range:
        return self.attribution.measured.groups

    def _worst(self, cause: str) -> int:
        """Returns the operation to blame for the most nanoseconds of a cause in all gaps; -1 for none."""
        blamed: collections.Counter[int] = collections.Counter()
        for gap in self.attribution.gaps:
            for culprit in gap.culprits:
                if culprit.cause == cause:
                    blamed[culprit.operation] += culprit.nanoseconds
        return blamed.most_common(1)[0][0] if blamed else -1


def loads_of(attribution: Attribution) -> dict[int, float]:
    """The nanoseconds of work in loops, by group. Groups without such work have no entry."""
    measured = attribution.measured
    workload = measured.workload
    loads = {
        group: sum(
            workload.durations[i] for i in measured.tasks(group) if isinstance(workload.tasks[i], Cell)
        )
        for group in measured.groups
    }
    return {group: load for group, load in loads.items() if load}
