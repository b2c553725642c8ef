"""Predictions of published step times: ratios of predicted to measured, and the choice among measured ways.

Nothing is compiled or run: the planner's formulas price the step of each fact as the planner would. vTrain's
iterations are read from a checkout of it (``--vtrain PATH``), as this repository has no copy of them.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.frame import Limited, Row, Rows, Setup
from benchmarks.published.facts import Fact
from benchmarks.published.fitted import fitted_third, presets
from benchmarks.published.gpus import steps_of_gpus
from benchmarks.published.predict import Predictor, candidate_of
from benchmarks.published.tpus import steps_of_tpus
from benchmarks.published.vtrain import read
from mpmd.planner.candidate import Memory, Prediction
from mpmd.planner.candidate import Row as Way
from mpmd.planner.reasons import in_order

ENOUGH = 10
MISS, CHOSEN, WORST = 0.10, 1.05, 1.25
"""The bars: the mean miss of ``ENOUGH`` facts or more, and the chosen way over the best, mean and worst."""


def run(setup: Setup) -> Rows:
    """The rows by the presets, fitted and held out apart; vTrain's facts if there is a checkout."""
    vtrain = setup.options.vtrain
    facts = [*typed_in(), *([] if vtrain is None else read(vtrain))]
    predictor = Predictor(presets())
    ratios = {fact: predictor.seconds(fact) / fact.seconds for fact in facts}
    yield from _summary(ratios, fitted_third(facts))
    for fact in typed_in():
        yield "Steps of papers and pages, predicted over measured", _step(fact, ratios[fact])


def typed_in() -> list[Fact]:
    """The facts of papers and pages."""
    return [*steps_of_gpus(), *steps_of_tpus()]


def _groups(ratios: Mapping[Fact, float], fitted: frozenset[Fact]) -> dict[str, dict[Fact, float]]:
    """The ratios of each group; facts to which rates are fitted form a group of their own."""
    groups: dict[str, dict[Fact, float]] = collections.defaultdict(dict)
    for fact, ratio in ratios.items():
        groups[f"{fact.group} ({fact.device})" + (", fitted third" if fact in fitted else "")][fact] = ratio
    return groups


def chosen_over_best(ratios: Mapping[Fact, float]) -> list[float]:
    """The time of the chosen way over the time of the best way, for each problem with several measured ways.

    Among ways that may be as fast, the planner's preference decides: the simplest way, then the fewest tasks.
    """
    problems: dict[tuple[object, ...], list[Fact]] = collections.defaultdict(list)
    for fact in ratios:
        problems[fact.problem].append(fact)
    return [
        _chosen(ways, ratios).seconds / min(fact.seconds for fact in ways)
        for ways in problems.values()
        if len({_way_of(fact) for fact in ways}) > 1
    ]


def _chosen(ways: Sequence[Fact], ratios: Mapping[Fact, float]) -> Fact:
    memory = Memory(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    rows = [
        Way(
            candidate_of(fact, fact.microbatch, remat=False),
            Prediction(ratios[fact] * fact.seconds, 0.0, 0.0, memory, (), "formula"),
        )
        for fact in ways
    ]
    tasks = [fact.pipeline * fact.batch / (fact.data * fact.microbatch) for fact in ways]
    return ways[in_order(rows, tasks)[0]]


def _summary(ratios: Mapping[Fact, float], fitted: frozenset[Fact]) -> Rows:
    """The misses of each group of facts, and the choices among the ways of each problem."""
    for group, of_group in sorted(_groups(ratios, fitted).items()):
        values = list(of_group.values())
        miss = statistics.mean(abs(ratio - 1) for ratio in values)
        yield (
            "Predicted over measured",
            {
                "": group,
                "steps": len(values),
                "mean ratio": statistics.mean(values),
                "median ratio": values,
                "mean miss": Limited(miss, MISS) if len(values) >= ENOUGH else miss,
                "least": min(values),
                "most": max(values),
            },
        )
    for group in sorted({fact.group for fact in ratios}):
        over = chosen_over_best({fact: ratio for fact, ratio in ratios.items() if fact.group == group})
        if over:
            mean, worst = statistics.mean(over), max(over)
            cells = {"mean": Limited(mean, CHOSEN), "worst": Limited(worst, WORST)}
            yield "Chosen way over the best", {"": group, "problems": len(over), **cells}


def _step(fact: Fact, ratio: float) -> Row:
    names = ("tensor", "data", "pipeline", "chunks", "microbatch")
    way = " ".join(f"{name} {value}" for name, value in zip(names, _way_of(fact), strict=True))
    size = f"{fact.model.layers} x {fact.model.width}"
    return {"": fact.group, "layers x width": size, "way": way, "s": fact.seconds, "ratio": ratio}


def _way_of(fact: Fact) -> tuple[int, ...]:
    return fact.tensor, fact.data, fact.pipeline, fact.chunks, fact.microbatch
