"""A profile as text: the length of the step, where each group's time went, and the first findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mpmd.attribution.attribution import Attribution
from mpmd.attribution.findings import Finding
from mpmd.attribution.gaps import Causes
from mpmd.attribution.texts import time_text
from mpmd.util.tables import aligned

SHOWN_FINDINGS = 3


def findings_lines(title: str, findings: Sequence[Finding]) -> list[str]:
    return [title, *(f"  - {finding}" for finding in findings[:SHOWN_FINDINGS])] if findings else []


def profile_text(
    attribution: Attribution, findings: tuple[Finding, ...], num_steps: int, recoveries: Mapping[int, int]
) -> str:
    """Formats a profile; ``recoveries`` are nanoseconds by the number of a step, as in ``Profile``."""
    length = attribution.measured.returned
    shown = [name for name in Causes._fields if getattr(attribution.total, name)]
    rows = [("group", "at work", *(name.replace("_", " ") for name in shown))]
    for group, causes in enumerate(attribution.by_group):
        shares = [length - sum(causes), *(getattr(causes, name) for name in shown)]
        rows.append((str(group), *(f"{share / length:.1%}" for share in shares)))
    counted = attribution.measured.steps
    of_steps = f", the median of {counted}" if counted > 1 else ""
    return "\n".join(
        [
            f"a step of {time_text(length)}{of_steps}; of it, each group was",
            *aligned(rows, left=()),
            *_recovery_lines(attribution.measured.step, num_steps, recoveries),
            *findings_lines("what would help, by simulation:", findings),
        ]
    )


def _recovery_lines(shown: int, num_steps: int, recoveries: Mapping[int, int]) -> Iterator[str]:
    for step, time in recoveries.items():
        if step == shown:
            yield f"groups were replaced for {time_text(time)} after its call, which is no part of it"
        else:
            yield (
                f"step {step + 1} of {num_steps} does not count: it ran after groups were replaced, "
                f"{time_text(time)} after its call"
            )
