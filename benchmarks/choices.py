"""The choice of ``mpmd.plan``, beside the next rows of its table, all of which run.

The step is a chain of square layers with Adam that leaves all open: layers, stages, groups, schedule and
microbatches. In process candidates may have any groups; on Ray those that were launched. ``mpmd.plan``
simulates with devices that were calibrated just before, and measures the tasks of no candidate, or of as many
as run here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.groups import Where, groups_at, places_of
from benchmarks.measure import Conditions, Result, Table, Target
from benchmarks.predicted_choices import Ranked, RankingCase

BAR = 0.05
LAYERS, WIDTH, ROWS = 6, 768, 2048
SHOWN, SHOWN_QUICKLY = 6, 3


def run(conditions: Conditions) -> Result:
    found = {where: _rankings(where, conditions) for where in places_of(conditions)}
    tables = [_table(source, {w: of_place[source] for w, of_place in found.items()}) for source in SOURCES]
    targets = [
        Target(
            f"the choice by {source} / the best row that ran, largest",
            max(_longer(of_place[source]) for of_place in found.values()),
            1 + BAR,
        )
        for source in SOURCES
    ]
    data = {
        str(where): {source: list(map(dataclasses.asdict, rows)) for source, rows in of_place.items()}
        for where, of_place in found.items()
    }
    return Result(tables, targets, data)


SOURCES = ("simulation", "measurement")
"""The sources of the numbers of the table."""


def _rankings(where: Where, conditions: Conditions) -> dict[str, list[Ranked]]:
    """The best rows of tables with numbers of each source."""
    shown = SHOWN_QUICKLY if conditions.quick else SHOWN
    cases = {
        source: RankingCase(LAYERS, WIDTH, ROWS, shown, shown if source == "measurement" else 0)
        for source in SOURCES
    }
    with groups_at(where, conditions) as host:
        return {
            source: host.call("ranked", case, conditions.effort.repetitions) for source, case in cases.items()
        }


def _longer(rows: Sequence[Ranked]) -> float:
    """The ratio of the time of the first row to that of the best one."""
    return rows[0].median / min(row.median for row in rows)


def _table(source: str, found: Mapping[Where, Sequence[Ranked]]) -> Table:
    rows = tuple(
        (
            f"{where}: {number}. {row.candidate}",
            f"{row.predicted * 1e3:.0f}",
            f"{row.median * 1e3:.0f}",
            f"{row.predicted / row.median:.2f}",
            f"{row.median / min(other.median for other in table):.3f}",
        )
        for where, table in found.items()
        for number, row in enumerate(table, 1)
    )
    header = (f"ms of a step, by {source}", "predicted", "measured", "ratio", "measured / best")
    return Table(f"The first rows of a choice by {source}", header, rows)
