"""The data of a page."""

from __future__ import annotations

from collections.abc import Iterator

from mpmd.render.page.lanes import busy_shares, groups_data, path_data, simulated_steps, simulations_data
from mpmd.render.page.memory import memory_data
from mpmd.render.page.palette import CAUSES, SIMULATED, TASKS, with_total
from mpmd.render.page.schema import Fact, FindingData, PageData, Part
from mpmd.render.page.subject import Subject
from mpmd.render.page.tables import capitalized, sections_data, types_data


def page_data(subject: Subject) -> PageData:
    """All that a page shows of a profile, without what changed from another one."""
    simulated, types, memory = simulated_steps(subject), types_data(subject), memory_data(subject)
    return PageData(
        name=subject.name,
        makespan=subject.measured.returned,
        whole=subject.measured.returned * len(subject.tasks),
        facts=list(_facts(subject)),
        findings=_findings(subject),
        parts=parts_of(subject),
        types=types,
        groups=groups_data(subject, simulated),
        busy=busy_shares(subject),
        simulations=simulations_data(subject, simulated),
        path=path_data(subject),
        memory=memory,
        changes=None,
        sections=list(sections_data(subject, types, memory)),
    )


def parts_of(subject: Subject) -> list[Part]:
    """The time of tasks and the idle time by cause, of all groups; the parts add up to their time."""
    total = subject.attribution.total
    tasks = sum(subject.measured.durations[task] for of_group in subject.tasks for task in of_group)
    causes = (with_total(CAUSES[cause], time) for cause, time in total._asdict().items())
    return [with_total(TASKS, tasks), *causes]


def _findings(subject: Subject) -> list[FindingData]:
    return [
        FindingData(
            text=f"{capitalized(finding.text)}.",
            saves=finding.share_saved,
            task=subject.number(finding.operation),
        )
        for finding in subject.analysis.findings
    ]


def _facts(subject: Subject) -> Iterator[Fact]:
    measured, attribution = subject.measured, subject.attribution
    whole = measured.returned * len(subject.tasks) or 1
    called = (
        "From the driver's call to its return with all replies; of several steps, the one of median length."
    )
    yield Fact(label="Step", value=measured.returned, unit="time", hint=called)
    yield Fact(label="Ideal", value=attribution.ideal.makespan, unit="time", hint=SIMULATED["Ideal"])
    idle = "The share of the groups' time without a task. The colours below say why, and what one can do."
    yield Fact(label="Idle", value=sum(attribution.total) / whole, unit="share", hint=idle)
    yield Fact(label="Groups", value=len(subject.tasks), unit="count", hint="")
    yield Fact(label="Tasks", value=sum(map(len, subject.tasks)), unit="count", hint="")
    if subject.memory:
        peak = max(parts.total for of_group in subject.memory for parts in of_group.parts)
        yield Fact(
            label="Peak memory", value=peak, unit="bytes", hint="The most bytes on one device at once."
        )
    left_out = 0 if measured.step in subject.analysis.recoveries else len(subject.analysis.recoveries)
    if (num_steps := measured.steps + left_out) > 1:
        text = f"{measured.step + 1} of {num_steps}"
        yield Fact(
            label="Recorded step", value=text, unit="text", hint="Medians are over all recorded steps."
        )
    for step, time in subject.analysis.recoveries.items():
        label = f"Recovery before step {step + 1}"
        yield Fact(
            label=label, value=time, unit="time", hint="Groups were replaced; the step does not count."
        )
    if subject.analysis.step.error:
        hint = "Times of different nodes may be wrong by this much."
        yield Fact(label="Clocks agree within", value=subject.analysis.step.error, unit="time", hint=hint)
