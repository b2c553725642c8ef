"""The data of one profile on a page."""

from __future__ import annotations

from mpmd.attribution.gaps import Causes
from mpmd.render.page.advice import findings_data, scenarios_data
from mpmd.render.page.lanes import busy_shares, groups_data, simulated_steps, simulations_data, waits_data
from mpmd.render.page.memory import memory_data
from mpmd.render.page.palette import CAUSES
from mpmd.render.page.schema import Fact, ProfileData
from mpmd.render.page.subject import Subject
from mpmd.render.page.tables import edges_data, path_data, processes_data, stages_data, types_data


def profile_data(subject: Subject) -> ProfileData:
    """All that a page shows of a profile."""
    measured, simulated = subject.measured, simulated_steps(subject)
    total = subject.attribution.total
    return ProfileData(
        name=subject.name,
        makespan=measured.returned,
        idle=sum(total),
        facts=_facts(subject),
        findings=findings_data(subject),
        causes=[CAUSES[cause].part(cause, getattr(total, cause)) for cause in Causes._fields],
        types=types_data(subject),
        groups=groups_data(subject, simulated),
        busy=busy_shares(subject),
        simulations=simulations_data(subject, simulated),
        path=path_data(subject),
        waits=waits_data(subject),
        scenarios=scenarios_data(subject),
        memory=memory_data(subject),
        edges=edges_data(subject),
        stages=stages_data(subject),
        processes=processes_data(subject),
        compile=[(phase, seconds) for phase, seconds in subject.compile_seconds.items()],
    )


def _facts(subject: Subject) -> list[Fact]:
    measured, attribution = subject.measured, subject.attribution
    whole = measured.returned * len(subject.tasks)
    facts = [
        Fact(label="Step", value=measured.returned, unit="time"),
        Fact(label="Ideal", value=attribution.ideal.makespan, unit="time"),
        Fact(label="Idle", value=sum(attribution.total) / (whole or 1), unit="share"),
        Fact(label="Groups", value=len(subject.tasks), unit="count"),
        Fact(label="Tasks", value=sum(map(len, subject.tasks)), unit="count"),
    ]
    if subject.memory:
        peak = max(parts.total for of_group in subject.memory for parts in of_group.parts)
        facts.append(Fact(label="Peak memory", value=peak, unit="bytes"))
    left_out = 0 if measured.step in subject.recoveries else len(subject.recoveries)
    if (num_steps := measured.steps + left_out) > 1:
        text = f"{measured.step + 1} of {num_steps}"
        facts.append(Fact(label="Recorded step", value=text, unit="text"))
    for step, time in subject.recoveries.items():
        facts.append(Fact(label=f"Recovery before step {step + 1}", value=time, unit="time"))
    if subject.step.error:
        facts.append(Fact(label="Clocks agree within", value=subject.step.error, unit="time"))
    return facts
