"""Predictions of published step times: ratios of predicted to measured, and the choice among measured ways.

Nothing is compiled or run: the planner's formulas price the step of each fact as the planner would. vTrain's
iterations are read from a checkout of it (``--vtrain PATH``), as this repository has no copy of them.
"""

from __future__ import annotations

import collections
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.measure import Conditions, Result, Table, Target
from benchmarks.published.facts import Fact
from benchmarks.published.fitted import FITTED, datasheets, fitted_third
from benchmarks.published.predict import Predictor, candidate_of
from benchmarks.published.tables import typed_in
from benchmarks.published.vtrain import read
from mpmd.planner.expected_errors import EXPECTED_ERRORS
from mpmd.planner.simplicity import Option, in_order

ENOUGH = 10
MISS, CHOSEN, WORST = 0.10, 1.05, 1.25
"""The bars: the mean miss of ``ENOUGH`` facts or more, and the chosen way over the best, mean and worst."""


def run(conditions: Conditions) -> Result:
    """The tables by datasheets alone, and by fitted curves."""
    return compared(conditions.vtrain)


def compared(vtrain: pathlib.Path | None) -> Result:
    """The tables, with vTrain's facts if there is a checkout of it."""
    of_vtrain = [] if vtrain is None else list(read(vtrain))
    facts = [*typed_in(), *of_vtrain]
    fitted = fitted_third(facts)
    clusters = {"rates of datasheets": datasheets, "fitted curves": FITTED.clusters}
    ratios = {name: _ratios(facts, Predictor(of_kinds)) for name, of_kinds in clusters.items()}
    tables = [_summary(name, of_facts, fitted) for name, of_facts in ratios.items()]
    tables.append(_by_tensor(ratios, of_vtrain))
    tables.append(_each(ratios, [fact for fact in facts if fact not in {*of_vtrain}]))
    data = {
        name: [[fact.group, *_way_text(fact), ratio] for fact, ratio in of_facts.items()]
        for name, of_facts in ratios.items()
    }
    return Result(tables, [*_targets(ratios["fitted curves"], fitted)], data)


def _ratios(facts: Sequence[Fact], predictor: Predictor) -> dict[Fact, float]:
    """Predicted over measured; of equal ways with several measured times, each counts."""
    return {fact: predictor.seconds(fact) / fact.seconds for fact in facts}


def _groups(ratios: Mapping[Fact, float], fitted: frozenset[Fact]) -> dict[str, dict[Fact, float]]:
    """The ratios of each group; those of facts to which curves are fitted are groups of their own."""
    groups: dict[str, dict[Fact, float]] = collections.defaultdict(dict)
    for fact, ratio in ratios.items():
        groups[fact.group + (", fitted third" if fact in fitted else "")][fact] = ratio
    return groups


def _miss(ratios: Mapping[Fact, float]) -> float:
    return statistics.mean(abs(ratio - 1) for ratio in ratios.values())


def chosen_over_best(ratios: Mapping[Fact, float]) -> list[float]:
    """The time of the chosen way over that of the best.

    There is one number for each problem of which several ways were measured. Of ways that may be as fast, the
    planner's preference decides: the simplest, and of these the one with the fewest tasks.
    """
    problems: dict[tuple[object, ...], list[Fact]] = collections.defaultdict(list)
    for fact in ratios:
        problems[fact.problem].append(fact)
    return [
        _chosen(ways, ratios).seconds / min(fact.seconds for fact in ways)
        for ways in problems.values()
        if len({_way_text(fact) for fact in ways}) > 1
    ]


def _chosen(ways: Sequence[Fact], ratios: Mapping[Fact, float]) -> Fact:
    options = [
        Option(
            candidate_of(fact, fact.microbatch, remat=False),
            ratios[fact] * fact.seconds,
            EXPECTED_ERRORS["formula"],
            fact.pipeline * fact.batch / (fact.data * fact.microbatch),
        )
        for fact in ways
    ]
    return ways[in_order(options)[0]]


def _summary(name: str, ratios: Mapping[Fact, float], fitted: frozenset[Fact]) -> Table:
    rows = []
    for group, of_group in sorted(_groups(ratios, fitted).items()):
        values = list(of_group.values())
        cells = [group, str(len(values)), f"{statistics.mean(values):.2f}", f"{_miss(of_group):.1%}"]
        rows.append((*cells, f"{min(values):.2f} to {max(values):.2f}", "", ""))
    for group in sorted({fact.group for fact in ratios}):
        over = chosen_over_best({fact: ratio for fact, ratio in ratios.items() if fact.group == group})
        if over:
            text = f"{statistics.mean(over):.3f}", f"{max(over):.2f}"
            rows.append((f"{group}, choices", str(len(over)), "", "", "", *text))
    header = ("", "count", "mean ratio", "mean miss", "range", "chosen over best", "worst")
    return Table(f"Predicted over measured, {name}", header, tuple(rows))


def _by_tensor(ratios: Mapping[str, Mapping[Fact, float]], facts: Sequence[Fact]) -> Table:
    """The mean ratios of vTrain's facts by the degree of tensor parallelism."""
    keys = sorted({(fact.group, fact.tensor) for fact in facts})
    rows = []
    for group, tensor in keys:
        some = [fact for fact in facts if (fact.group, fact.tensor) == (group, tensor)]
        means = [f"{statistics.mean(of_facts[fact] for fact in some):.2f}" for of_facts in ratios.values()]
        rows.append((f"{group}, tensor {tensor}", str(len(some)), *means))
    return Table("Mean ratios by tensor parallelism", ("", "count", *ratios), tuple(rows))


def _each(ratios: Mapping[str, Mapping[Fact, float]], facts: Sequence[Fact]) -> Table:
    """The ratios of facts from papers and pages."""
    rows = []
    for fact in facts:
        of_fact = (f"{of_facts[fact]:.2f}" for of_facts in ratios.values())
        size = f"{fact.model.layers} x {fact.model.width}"
        rows.append((fact.group, size, str(fact.devices), f"{fact.seconds:.2f}", *of_fact))
    return Table("Steps of papers and pages", ("", "layers x width", "devices", "s", *ratios), tuple(rows))


def _way_text(fact: Fact) -> tuple[int, ...]:
    return fact.tensor, fact.data, fact.pipeline, fact.chunks, fact.microbatch


def _targets(ratios: Mapping[Fact, float], fitted: frozenset[Fact]) -> list[Target]:
    targets = [
        Target(f"mean miss: {group}", _miss(of_group), MISS)
        for group, of_group in sorted(_groups(ratios, fitted).items())
        if len(of_group) >= ENOUGH
    ]
    for group in sorted({fact.group for fact in ratios}):
        over = chosen_over_best({fact: ratio for fact, ratio in ratios.items() if fact.group == group})
        if over:
            targets.append(Target(f"chosen over best: {group}", statistics.mean(over), CHOSEN))
            targets.append(Target(f"worst chosen over best: {group}", max(over), WORST))
    return targets
