"""The findings of a page, and the simulated steps that they rest on."""

from __future__ import annotations

import collections

from mpmd.render.page.schema import FindingData, ScenarioData, ScheduleData
from mpmd.render.page.subject import Subject


def findings_data(subject: Subject) -> list[FindingData]:
    """The findings as sentences, each with the task that is most to blame for its cause."""
    blamed = _blamed(subject)
    return [
        FindingData(
            text=f"{finding.text[:1].upper()}{finding.text[1:]}.",
            saves=finding.share_saved,
            task=blamed.get(finding.cause, -1),
        )
        for finding in subject.findings
    ]


def _blamed(subject: Subject) -> dict[str, int]:
    """For each cause of idle time, the number of the task that has the most of it in all gaps together."""
    sums: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for gap in subject.attribution.gaps:
        for culprit in gap.culprits:
            sums[culprit.cause][culprit.operation] += culprit.nanoseconds
    return {cause: subject.number(of_cause.most_common(1)[0][0]) for cause, of_cause in sums.items()}


def scenarios_data(subject: Subject) -> list[ScenarioData]:
    """The step with single things changed, beside the model of it with nothing changed, which is first."""
    whole = subject.scenarios[0].makespan if subject.scenarios else 1
    return [
        ScenarioData(
            name=scenario.name[:1].upper() + scenario.name[1:],
            meaning=scenario.text,
            makespan=scenario.makespan,
            saves=scenario.saves / (whole or 1),
        )
        for scenario in subject.scenarios
    ]


def schedules_data(subject: Subject) -> list[ScheduleData]:
    """The step with other schedules and numbers of microbatches."""
    return [
        ScheduleData(
            name=alternative.schedule,
            stages=alternative.num_stages,
            microbatches=alternative.num_microbatches,
            makespan=alternative.makespan,
            saves=alternative.saves / (alternative.makespan + alternative.saves or 1),
            extra_bytes=alternative.extra_bytes,
        )
        for alternative in subject.alternatives
    ]
