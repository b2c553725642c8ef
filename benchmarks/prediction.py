"""The planner's predictions of steps, beside the measurements of the same steps.

Steps are of a chain of square layers, a U-Net, a transformer with a large vocabulary and an MLP of uneven
widths, with Adam. A step time is that of several steps in a row. It is predicted
by simulating the plan: with tasks that were measured (``measured tasks``) and, as ``formula``, with the work
of the plan's equations on devices that were calibrated just before. ``tasks of the run`` are the
times that tasks took in these steps, in which they disturb one another and others disturb them: what is off
there is the simulator's. Tasks that sleep take an exact time. Of all ways to run the same training step,
``chosen`` is the one with the shortest time by formula; ``benchmarks.choices`` has those of ``mpmd.plan``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.groups import Where, groups_at, places_of
from benchmarks.measure import Conditions, Result, Table, Target
from benchmarks.planned_models import Chain, LargeVocabulary, Model, UNet, UnevenMLP, balanced, equal_layers
from benchmarks.predicted_steps import Case, Peak, Times
from mpmd import Eager1F1B, GPipe, Interleaved1F1B, Std1F1B, ZeroBubble

EXACT_BAR, TASKS_BAR, FORMULA_BAR, RANKING_BAR, MEMORY_BAR = 0.10, 0.10, 0.25, 0.05, 0.10

WIDTH, ROWS = 768, 2048
MEMORY_WIDTH, MEMORY_ROWS = 2048, 8192
TINY_WIDTH, TINY_ROWS = 8, 64
SLEEPING_REPETITIONS = 2
"""Of tasks that take an exact time."""

UNEVEN = (1.0, 1.5, 1.0, 2.0)


def run(conditions: Conditions) -> Result:
    places = places_of(conditions)
    slept = {where: dict(_sleep(where, conditions)) for where in (Where(2, False), Where(4, True))}
    computed, facts = {}, []
    for where in places:
        with groups_at(where, conditions) as host:
            facts.append((str(where), host.call("described")))
            computed[where] = {
                case: host.call("times", case, conditions.effort.repetitions)
                for case in cases_of(where, conditions)
            }
    peaks = _allocate(conditions)
    ranked = [row for where, times in computed.items() for row in _rankings(where, times)]
    tables = [
        Table("Calibrated devices", ("", "each, while all compute"), tuple(facts)),
        _sleeping_table(slept),
        _computing_table(computed),
        Table("The choice among the steps above", _RANKING, tuple(_ranking_row(*row) for row in ranked)),
        Table("Memory of a group's process, MiB", _MEMORY, tuple(map(_memory_row, peaks))),
    ]
    return Result(tables, _targets(slept, computed, ranked, peaks), _data(slept, computed, peaks))


# Tasks that sleep.


def _sleep(where: Where, conditions: Conditions) -> Iterator[tuple[Case, Times]]:
    groups, sleeps = where.groups, UNEVEN[: where.groups]
    stages = (1,) * groups
    cases = [
        Case(Chain(groups, TINY_WIDTH, TINY_ROWS), stages, schedule, microbatches)
        for schedule, microbatches in (
            (Std1F1B(groups), 4),
            (Eager1F1B(groups), 8),
            (ZeroBubble(groups), 8),
            (GPipe(groups), 8),
            (Std1F1B(groups), 32),
        )
    ]
    with groups_at(where, conditions, sleeps) as host:
        for case in cases[: 3 if conditions.quick else None]:
            yield case, host.call("sleeping", case, sleeps, SLEEPING_REPETITIONS)


# Tasks that compute.


def cases_of(where: Where, conditions: Conditions) -> list[Case]:
    """The steps that run at a place: even and uneven stages, several schedules, 4 to 32 microbatches."""
    groups = where.groups
    even, uneven = (2,) * groups, (1, 3) if groups == 2 else (3, 2, 2, 1)
    interleaved = (1,) * 2 * groups
    ways = [
        (even, Std1F1B(groups), 4),
        (uneven, Std1F1B(groups), 8),
        (even, ZeroBubble(groups), 8),
        (uneven, GPipe(groups), 4),
        (even, Eager1F1B(groups), 16),
        (interleaved, Interleaved1F1B(2 * groups, groups), 8),
        (even, Std1F1B(groups), 32),
    ]
    if conditions.quick:
        ways = ways[:3]
    chain = Chain(2 * groups, WIDTH, ROWS)
    return [
        *(Case(chain, layers, schedule, m) for layers, schedule, m in ways),
        *(
            case
            for model in (MODELS if groups == 2 and not where.on_ray else ())
            for case in _unlike_layers(model, groups)
        ),
    ]


MODELS: Sequence[Model] = (UNet(), LargeVocabulary(), UnevenMLP())
"""The models whose layers are unlike."""


def _unlike_layers(model: Model, groups: int) -> list[Case]:
    """Steps with as many layers in each stage as in the others, and with as much work."""
    equal, by_work = equal_layers(len(model.layers), groups), balanced(model.work(), groups)
    return [
        Case(model, equal, GPipe(groups), 2 * groups),
        Case(model, by_work, Std1F1B(groups), 4 * groups),
        Case(model, by_work, ZeroBubble(groups), 4 * groups),
    ]


def _rankings(where: Where, times: Mapping[Case, Times]) -> Iterator[tuple[Where, Case, Case, float]]:
    """For each model the chosen case, the best one, and how much longer the chosen one takes."""
    for model in dict.fromkeys(case.model for case in times):
        cases = [case for case in times if case.model == model]
        chosen = min(cases, key=lambda case: times[case].formula)
        best = min(cases, key=lambda case: times[case].median)
        yield where, chosen, best, times[chosen].median / times[best].median


# Memory.


def _allocate(conditions: Conditions) -> list[tuple[Case, Peak]]:
    case = Case(Chain(4, MEMORY_WIDTH, MEMORY_ROWS), (2, 2), Std1F1B(2), 4)
    with groups_at(Where(2, True), conditions, gives_back=True) as host:
        return [(case, peak) for peak in host.call("peaks", case)]


# Tables.


_RANKING = ("", "chosen by the formula", "the best that ran", "chosen / best", "within bar")
_MEMORY = ("", "formula", "ratio", "with XLA's temporaries", "ratio", "allocated", "within bar")


def _sleeping_table(slept: Mapping[Where, Mapping[Case, Times]]) -> Table:
    rows = tuple(
        (
            f"{where}, {type(case.schedule).__name__}, {case.microbatches} microbatches",
            f"{times.formula * 1e3:.1f}",
            f"{times.median * 1e3:.1f}",
            *_judged(times.formula, times.median, EXACT_BAR),
        )
        for where, cases in slept.items()
        for case, times in cases.items()
    )
    header = ("ms of a step, tasks that sleep", "predicted", "measured", "ratio", "within bar")
    return Table("Exact task times, uneven stages", header, rows)


def _computing_table(computed: Mapping[Where, Mapping[Case, Times]]) -> Table:
    rows = tuple(
        (
            f"{where}, {case}",
            f"{times.median * 1e3:.0f}",
            f"{times.spread:.2f}",
            f"{times.measured_tasks * 1e3:.0f}",
            *_judged(times.measured_tasks, times.median, TASKS_BAR),
            f"{times.formula * 1e3:.0f}",
            *_judged(times.formula, times.median, FORMULA_BAR),
            *_judged(times.run_tasks, times.median, TASKS_BAR),
        )
        for where, cases in computed.items()
        for case, times in cases.items()
    )
    header = (
        "ms of a step, tasks that compute",
        "measured",
        "spread",
        "measured tasks",
        "ratio",
        "within bar",
        "formula",
        "ratio",
        "within bar",
        "tasks of the run, ratio",
        "within bar",
    )
    return Table("Computed tasks", header, rows)


def _ranking_row(where: Where, chosen: Case, best: Case, longer: float) -> tuple[str, ...]:
    return str(where), str(chosen), str(best), f"{longer:.3f}", _yes(longer - 1 <= RANKING_BAR)


def _memory_row(row: tuple[Case, Peak]) -> tuple[str, ...]:
    case, peak = row
    formula, of_tasks, allocated = (
        f"{nbytes / 2**20:.0f}" for nbytes in (peak.formula, peak.compiled, peak.allocated)
    )
    ratio, _ = _judged(peak.formula, peak.allocated, MEMORY_BAR)
    return (
        f"group {peak.group}, {case}",
        formula,
        ratio,
        of_tasks,
        _judged(peak.compiled, peak.allocated, MEMORY_BAR)[0],
        allocated,
        _judged(peak.compiled, peak.allocated, MEMORY_BAR)[1],
    )


def _judged(predicted: float, measured: float, bar: float) -> tuple[str, str]:
    return f"{predicted / measured:.2f}", _yes(_miss(predicted, measured) <= bar)


def _yes(is_within: bool) -> str:
    return "yes" if is_within else "no"


def _miss(predicted: float, measured: float) -> float:
    """The distance of a prediction from the measurement, as a share of that."""
    return abs(predicted / measured - 1)


# For Targets and JSON.


def _targets(
    slept: Mapping[Where, Mapping[Case, Times]],
    computed: Mapping[Where, Mapping[Case, Times]],
    ranked: Sequence[tuple[Where, Case, Case, float]],
    peaks: Sequence[tuple[Case, Peak]],
) -> list[Target]:
    """The largest miss of each kind."""
    sleeping = [_miss(t.formula, t.median) for cases in slept.values() for t in cases.values()]
    times = [t for cases in computed.values() for t in cases.values()]
    return [
        Target("step time, tasks that sleep: largest miss", max(sleeping), EXACT_BAR),
        Target(
            "step time by measured tasks: largest miss",
            max(_miss(t.measured_tasks, t.median) for t in times),
            TASKS_BAR,
        ),
        Target(
            "step time by formula: largest miss", max(_miss(t.formula, t.median) for t in times), FORMULA_BAR
        ),
        Target("the chosen step / the best one, largest", max(row[-1] for row in ranked), 1 + RANKING_BAR),
        Target(
            "peak memory of a process: largest miss",
            max(_miss(peak.compiled, peak.allocated) for _, peak in peaks),
            MEMORY_BAR,
        ),
    ]


def _data(
    slept: Mapping[Where, Mapping[Case, Times]],
    computed: Mapping[Where, Mapping[Case, Times]],
    peaks: Sequence[tuple[Case, Peak]],
) -> dict:
    def rows(found: Mapping[Where, Mapping[Case, Times]]) -> list[dict]:
        return [
            {"where": str(where), "case": str(case), **dataclasses.asdict(times)}
            for where, cases in found.items()
            for case, times in cases.items()
        ]

    return {
        "sleeping": rows(slept),
        "computing": rows(computed),
        "memory": [{"case": str(case), **dataclasses.asdict(peak)} for case, peak in peaks],
    }
