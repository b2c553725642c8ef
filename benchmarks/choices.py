"""The choice of ``mpmd.plan``, beside the next rows of its tables and plans by hand, all of which run.

The steps leave all open: layers, stages, groups, schedule and microbatches. They train a chain of square
layers, a U-Net, a transformer with a large vocabulary and an MLP of uneven widths, with Adam. In process
candidates may have any groups; on Ray those that were launched. ``mpmd.plan`` simulates with devices that
were calibrated just before, and measures the tasks of no candidate, or of as many as run here; it plans
``SIMULATED`` candidates, which saves half a minute a choice. Plans by hand have a stage for each group.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.groups import Where, groups_at, places_of
from benchmarks.measure import Conditions, Result, Table, Target, ratio
from benchmarks.planned_models import Chain, LargeVocabulary, Model, UNet, UnevenMLP
from benchmarks.predicted_choices import RankingCase, Way

BARS = {"simulation": 1.10, "measurement": 1.05}
"""The most that a choice may take, over the best way that ran, by the source of its numbers."""

SHOWN, SHOWN_QUICKLY, SIMULATED = 4, 3, 12

TURNS = 2
"""Repetitions of each way that was not chosen: the best of a dozen ways is by chance the better, the fewer
measurements each has."""


def run(conditions: Conditions) -> Result:
    ways = {where: dict(_ways(where, conditions)) for where in places_of(conditions)}
    tables = [
        _table(model, [(where, of_models[model]) for where, of_models in ways.items() if model in of_models])
        for model in dict.fromkeys(model for of_models in ways.values() for model in of_models)
    ]
    targets = [
        Target(
            f"{model.name}: the choice by {source} / the best way that ran, largest",
            max(longer(of_models[model], source) for of_models in ways.values() if model in of_models),
            bar,
        )
        for model in dict.fromkeys(model for of_models in ways.values() for model in of_models)
        for source, bar in BARS.items()
    ]
    data = {
        str(where): {model.name: list(map(dataclasses.asdict, rows)) for model, rows in of_models.items()}
        for where, of_models in ways.items()
    }
    return Result(tables, targets, data)


def models_at(where: Where) -> list[Model]:
    """The models whose steps are chosen at a place: the chain, and all of them on two groups in process."""
    return [Chain(), *(() if where.on_ray or where.groups != 2 else (UNet(), LargeVocabulary(), UnevenMLP()))]


def longer(ways: Sequence[Way], source: str) -> float:
    """The ratio of the time of a choice to that of the best way; turns are compared with themselves."""
    chosen = next(way for way in ways if source in way.chosen_by)
    return max(ratio(chosen.run, way.run) for way in ways)


def _ways(where: Where, conditions: Conditions) -> Iterator[tuple[Model, list[Way]]]:
    """All ways that ran, for each model."""
    shown = SHOWN_QUICKLY if conditions.quick else SHOWN
    with groups_at(where, conditions) as host:
        for model in models_at(where):
            case = RankingCase(model, shown, SIMULATED, {"simulation": 0, "measurement": shown})
            yield model, host.call("ranked", case, TURNS * conditions.effort.repetitions)


def _table(model: Model, places: Sequence[tuple[Where, Sequence[Way]]]) -> Table:
    rows = tuple(
        (
            f"{where}: {way.text}",
            *(_milliseconds(way.predicted.get(source)) for source in BARS),
            _milliseconds(statistics.median(way.run)),
            f"{max(ratio(way.run, other.run) for other in ways):.3f}",
            " and ".join(way.chosen_by),
        )
        for where, ways in places
        for way in ways
    )
    header = (
        "ms of a step",
        "by simulation",
        "by measured tasks",
        "measured",
        "measured / best",
        "chosen by",
    )
    return Table(f"Choices and plans by hand: {model.name}", header, rows)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}"
