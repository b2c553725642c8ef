"""The changes from one measured step to another, by cause."""

from __future__ import annotations

from mpmd.render.page.palette import TASKS
from mpmd.render.page.schema import ChangedPart, ChangedType, ComparisonData, ProfileData, TypeData

LEAST_CHANGE = 0.005
"""The part of the step before below which a change has no sentence."""


def comparison_data(before: ProfileData, after: ProfileData) -> ComparisonData:
    """The changes by part of the step and by type of task."""
    parts = _parts(before, after)
    return ComparisonData(
        sentences=_sentences(before, after, parts), parts=parts, types=_types(before, after)
    )


def _parts(before: ProfileData, after: ProfileData) -> list[ChangedPart]:
    """The time of tasks and each cause of idle time, as means over the groups; they add up to the step."""
    pairs = zip(before["causes"], after["causes"], strict=True)
    tasks = ChangedPart(
        label=TASKS.label, colour=TASKS.colour, dark=TASKS.dark, before=_busy(before), after=_busy(after)
    )
    causes = [
        ChangedPart(
            label=cause["label"],
            colour=cause["colour"],
            dark=cause["dark"],
            before=cause["total"] / len(before["groups"]),
            after=other["total"] / len(after["groups"]),
        )
        for cause, other in pairs
    ]
    return [part for part in (tasks, *causes) if part["before"] or part["after"]]


def _busy(profile: ProfileData) -> float:
    return profile["makespan"] - profile["idle"] / len(profile["groups"])


def _types(before: ProfileData, after: ProfileData) -> list[ChangedType]:
    """The types of both steps, the largest change of the sum first."""
    olds, news = _by_name(before), _by_name(after)
    types = [_changed(*name, olds.get(name), news.get(name)) for name in {**olds, **news}]
    return sorted(types, key=lambda each: -abs(each["sum_after"] - each["sum_before"]))


def _by_name(profile: ProfileData) -> dict[tuple[str, int], TypeData]:
    return {(each["label"], each["group"]): each for each in profile["types"]}


def _changed(label: str, group: int, before: TypeData | None, after: TypeData | None) -> ChangedType:
    return ChangedType(
        label=label,
        group=group,
        before=before["median"] if before else None,
        after=after["median"] if after else None,
        sum_before=before["total"] if before else 0,
        sum_after=after["total"] if after else 0,
    )


def _sentences(before: ProfileData, after: ProfileData, parts: list[ChangedPart]) -> list[str]:
    old, new = before["makespan"], after["makespan"]
    share = f"{abs(new - old) / (old or 1):.1%}"
    if share == "0.0%":
        sentences = [f"The step takes {duration(new)}, as long as before."]
    else:
        direction = "more" if new > old else "less"
        sentences = [f"The step takes {duration(new)} instead of {duration(old)}: {share} {direction}."]
    ordered = sorted(parts, key=lambda part: -abs(part["after"] - part["before"]))
    for part in ordered[:3]:
        change = part["after"] - part["before"]
        if abs(change) >= LEAST_CHANGE * old:
            direction = "more" if change > 0 else "less"
            name = part["label"] if part["label"] == TASKS.label else f"Idle time, {part['label'].lower()}"
            sentences.append(f"{name}: {duration(abs(change))} {direction} per group.")
    if len(before["groups"]) != len(after["groups"]):
        sizes = f"{len(before['groups'])} groups before and {len(after['groups'])} after"
        sentences.append(f"The steps have {sizes}; times are means over the groups of each.")
    return sentences


def duration(nanoseconds: float) -> str:
    """A time with three digits and its unit, as in ``12.3 ms``."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(nanoseconds) >= size:
            return f"{nanoseconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{nanoseconds:.3g} ns"
