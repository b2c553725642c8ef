"""The findings of a page, and the simulated steps that they rest on."""

from __future__ import annotations

from mpmd.render.page.schema import FindingData, ScenarioData
from mpmd.render.page.subject import Subject


def findings_data(subject: Subject) -> list[FindingData]:
    """The findings as sentences, each with the task that has most to do with it."""
    return [
        FindingData(
            text=f"{_capitalized(finding.text)}.",
            saves=finding.share_saved,
            task=subject.number(finding.operation),
        )
        for finding in subject.findings
    ]


def _capitalized(text: str) -> str:
    """The text with a capital letter, unless it begins with the name of a task."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def scenarios_data(subject: Subject) -> list[ScenarioData]:
    """The simulated step with nothing changed, and with single things changed."""
    model, *changed = subject.scenarios
    share = model.makespan / (subject.measured.returned or 1)
    unchanged = ScenarioData(
        name="Nothing changed",
        meaning=f"the measured step as the simulator has it: {share:.1%} of its length",
        makespan=model.makespan,
        saves=0.0,
    )
    return [
        unchanged,
        *(
            ScenarioData(
                name=_capitalized(scenario.name),
                meaning=scenario.text,
                makespan=scenario.makespan,
                saves=scenario.saves / (model.makespan or 1),
            )
            for scenario in changed
        ),
    ]
