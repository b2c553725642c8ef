"""The data of a page."""

from __future__ import annotations

from collections.abc import Iterator

from mpmd.attribution.ideal import undisturbed
from mpmd.render.page.lanes import busy_shares, groups_data, path_data, simulations_data
from mpmd.render.page.memory import memory_data
from mpmd.render.page.palette import CAUSES, SIMULATED, TASKS, with_total
from mpmd.render.page.schema import Amount, Fact, FindingData, PageData
from mpmd.render.page.subject import Subject
from mpmd.render.page.tables import capitalized, sections_data, types_data


def page_data(subject: Subject) -> PageData:
    simulated = undisturbed(subject.measured.workload), subject.attribution.ideal
    types, memory = types_data(subject), memory_data(subject)
    return PageData(
        name=subject.name,
        makespan=subject.measured.returned,
        whole=subject.whole,
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


def parts_of(subject: Subject) -> list[Amount]:
    """The time of tasks and the idle time by cause, of all groups; the parts add up to their time."""
    total = subject.attribution.total
    tasks = subject.whole - sum(total)
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
    measured, attribution, recoveries = subject.measured, subject.attribution, subject.analysis.recoveries
    called = (
        "From the driver's call to its return with all replies; of several steps, the one of median length."
    )
    yield Fact("Step", measured.returned, "time", called)
    yield Fact("Ideal", attribution.ideal.makespan, "time", SIMULATED["Ideal"])
    idle = "The share of the groups' time without a task. The colours below say why, and what one can do."
    yield Fact("Idle", sum(attribution.total) / (subject.whole or 1), "share", idle)
    yield Fact("Groups", len(subject.tasks), "count")
    yield Fact("Tasks", sum(map(len, subject.tasks)), "count")
    if subject.memory:
        peak = max(parts.total for of_group in subject.memory for parts in of_group.parts)
        yield Fact("Peak memory", peak, "bytes", "The most bytes on one device at once.")
    left_out = 0 if measured.step in recoveries else len(recoveries)
    if (num_steps := measured.steps + left_out) > 1:
        text = f"{measured.step + 1} of {num_steps}"
        yield Fact("Recorded step", text, "text", "Medians are over all recorded steps.")
    for step, time in recoveries.items():
        replaced = "Groups were replaced; the step does not count."
        yield Fact(f"Recovery before step {step + 1}", time, "time", replaced)
    if error := subject.analysis.step.error:
        yield Fact(
            "Clocks agree within", error, "time", "Times of different nodes may be wrong by this much."
        )
