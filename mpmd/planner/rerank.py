"""Ranks the best candidates of the formulas again, by simulations of their plans and by measured tasks."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence

from mpmd.errors import CompileError, StepWarning
from mpmd.planner.candidate import Candidate, Prediction, Row
from mpmd.planner.choice_table import candidate_text, time_text
from mpmd.planner.pools import AnyCluster
from mpmd.planner.reasons import (
    Complexity,
    StepDoesNotFit,
    complexity,
    in_order,
    may_be_as_fast,
    memory_share,
    relabelled,
    shortage,
    slower_because,
)
from mpmd.planner.trials.realize import Realized

_logger = logging.getLogger(__name__)

MOST_PLANS = 5
"""The most plans if no number is asked for, unless none of the plans fits."""

MOST_SEARCHES = 4
"""The most searches for less memory, when candidates fit by the formulas and their plans do not."""

MOST_MEASURED = 3
"""The most candidates that are measured, for each that was asked for."""

Realize = Callable[[Candidate], Realized]
"""Compiles the plan of a candidate and simulates it. Raises ``CompileError``."""

Measure = Callable[[Realized, Candidate], Realized]

Search = Callable[[float], Sequence[Row]]
"""The rows by formula for devices with a share of their memory. Raises ``ValueError`` if nothing fits."""


@dataclasses.dataclass(frozen=True)
class PlanningLimits:
    """Limits of planning and measuring.

    Attributes:
      simulate: the number of candidates that are planned, unless none of their plans fits. ``None``: the
        candidates that may win by the formulas, ``MOST_PLANS`` at most.
      seconds: the time after which no further candidate is planned once one fits; ``None`` for no limit.
      measure: the number of candidates whose tasks are run at least.
    """

    simulate: int | None
    seconds: float | None
    measure: int


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The rows, the best first, the realized plan of the best, and notes for the user."""

    rows: tuple[Row, ...]
    winner: Realized
    notes: tuple[str, ...]


def rerank(
    search: Search, realize: Realize, measure: Measure, cluster: AnyCluster, limits: PlanningLimits
) -> Ranking:
    """Plans and simulates the best candidates of each kind, and ranks the plans.

    If no plan fits, it searches as if devices had less memory, by the factor that the plan with the least
    memory lacks. If again no plan fits, it plans the remaining candidates until one fits.

    Raises: ``ValueError`` when no candidate fits or can be compiled; as ``search`` for the whole memory.
    """
    end = math.inf if limits.seconds is None else time.monotonic() + limits.seconds
    most = max(limits.simulate or MOST_PLANS, limits.measure)
    share, planned = 1.0, list[_Planned]()
    waiting = _plan_rows(search(1.0), planned, realize, cluster, limits, most, end)
    for _ in range(MOST_SEARCHES):
        lacking = [share_ for one in planned if (share_ := memory_share(one.row, cluster)) > 1]
        if _fitting(planned) or not lacking:
            break
        share *= min(1 / min(lacking), 0.95)
        try:
            rows = search(share)
        except ValueError:  # so much less memory is too little by the formulas, too
            break
        tried, smaller = {one.row.candidate for one in planned}, cluster.with_memory(share)
        untried = (row for row in rows if row.candidate not in tried)
        rows = [row for row in untried if row.label or not shortage(row, smaller)]
        waiting = _plan_rows(rows, planned, realize, cluster, limits, most, end)
    while not _fitting(planned) and not all(shortage(row, cluster) for row in waiting):
        waiting = _plan_rows(waiting, planned, realize, cluster, limits, 1, end)
    if limits.measure:
        planned = _measured(planned, measure, cluster, limits)
    if not _fitting(planned):  # by their plans, or by the memory of their measured tasks
        raise _nothing_can_be_run([one.row for one in planned], cluster)
    return _ranking(planned, waiting, cluster)


@dataclasses.dataclass(frozen=True, eq=False)
class _Planned:
    """A candidate for which a plan was tried.

    Attributes:
      row: its row, with the prediction of ``realized``, and the reason why the candidate cannot run: it lacks
        memory, or cannot be compiled. The reason is empty for a candidate that can run.
      by_formula: the prediction by the formulas.
      realized: ``None`` for a candidate that cannot be compiled.
      simulated: the seconds of a step by the simulation of the plan.
    """

    row: Row
    by_formula: Prediction
    realized: Realized | None = None
    simulated: float = 0.0

    @property
    def is_measured(self) -> bool:
        return self.row.prediction.source == "measurement"

    def with_realized(self, realized: Realized, cluster: AnyCluster) -> _Planned:
        row = dataclasses.replace(self.row, prediction=realized.prediction)
        row = dataclasses.replace(row, reason=shortage(row, cluster))
        return dataclasses.replace(self, row=row, realized=realized)


def _fitting(planned: Iterable[_Planned]) -> list[_Planned]:
    return sorted((one for one in planned if not one.row.reason), key=lambda one: one.row.seconds)


# Planning.


def _plan_rows(
    rows: Sequence[Row],
    planned: list[_Planned],
    realize: Realize,
    cluster: AnyCluster,
    limits: PlanningLimits,
    most: int,
    end: float,
) -> list[Row]:
    """Appends candidates of rows to ``planned``; after the time ``end`` only until one fits by its plan.

    Args:
      most: the number of plans to make; candidates that cannot be compiled do not count.

    Returns: the rows that are left.
    """
    tried, most = list[Row](), most + sum(one.realized is not None for one in planned)
    for row in _in_order(rows, cluster):
        fitting = _fitting(planned)
        if (fitting and time.monotonic() > end) or sum(one.realized is not None for one in planned) == most:
            break
        if limits.simulate is None and len(fitting) >= max(1, limits.measure) and not _may_win(row, planned):
            continue
        so_far = f"; the best so far {time_text(fitting[0].row.prediction)}" if fitting else ""
        _logger.debug("planning candidate %d of at most %d%s", len(planned) + 1, most, so_far)
        planned.append(_plan_row(row, realize, cluster))
        tried.append(row)
    return [row for row in rows if row not in tried]


def _plan_row(row: Row, realize: Realize, cluster: AnyCluster) -> _Planned:
    try:
        with warnings.catch_warnings():
            # The table has what such warnings say of a candidate.
            warnings.simplefilter("ignore", StepWarning)
            realized = realize(row.candidate)
    except CompileError as error:
        reason = f"cannot be compiled: {error.faults[0].splitlines()[0]}"
        return _Planned(dataclasses.replace(row, reason=reason), row.prediction)
    planned = _Planned(row, row.prediction, simulated=realized.prediction.seconds)
    return planned.with_realized(realized, cluster)


def _may_win(row: Row, planned: Sequence[_Planned]) -> bool:
    """Whether a row would be chosen before all plans if its plan took the time that the formulas say."""
    chosen, fastest = _preferred(planned)[0].row, _fitting(planned)[0].row
    if complexity(row.candidate) < complexity(chosen.candidate):
        return may_be_as_fast(row, fastest)
    return not may_be_as_fast(chosen, row)


def _in_order(rows: Sequence[Row], cluster: AnyCluster) -> list[Row]:
    """Orders the rows that fit: the simplest row that may be as fast as the best, the best row, the best row
    of each other ``complexity``, and the rest.

    Of several rows that are equally simple, the row with the fewest tasks is the fastest to plan.
    """
    fitting = [row for row in rows if not shortage(row, cluster)]
    if not fitting:
        return []
    equal = (row for row in fitting if may_be_as_fast(row, fitting[0]))
    simplest = min(equal, key=lambda row: (complexity(row.candidate), _num_tasks(row.candidate)))
    of_kinds: dict[Complexity, Row] = {}
    for row in (fitting[0], simplest, *fitting):
        of_kinds.setdefault(complexity(row.candidate), row)
    first = [of_kinds.pop(complexity(simplest.candidate)), *of_kinds.values()]
    return [*first, *(row for row in fitting if row not in first)]


def _num_tasks(candidate: Candidate) -> int:
    return sum(loop.schedule.num_stages * loop.num_passes for loop in candidate.loops)


def _nothing_can_be_run(refused: Sequence[Row], cluster: AnyCluster) -> ValueError:
    lines = []
    short = [row for row in refused if shortage(row, cluster)]
    if short:
        least = min(short, key=lambda row: memory_share(row, cluster))
        text = candidate_text(least.candidate)
        lines.append(f"{text}, which needs least of those that were planned, {least.reason}")
        lines.append("give devices more memory, take more of them, or fix less")
    lines += dict.fromkeys(row.reason for row in refused if row not in short)
    text = "no candidate can be run:\n  " + "\n  ".join(lines)
    return StepDoesNotFit(text) if short else ValueError(text)


# Measuring.


def _measured(
    planned: Sequence[_Planned], measure: Measure, cluster: AnyCluster, limits: PlanningLimits
) -> list[_Planned]:
    """Measures ``limits.measure`` candidates, and more until no unmeasured candidate may be the fastest.

    A candidate may be the fastest if its simulated time, less its expected error, is below the fastest
    measured time. The test takes the simulated time as it is and scaled by the median of measured over
    simulated times, because a slow machine may not slow every candidate. At the end, the times of
    unmeasured candidates are scaled by this median.
    """

    def measured(one: _Planned) -> _Planned:
        assert one.realized is not None, f"{one.row.candidate} has no plan"
        _logger.debug("measuring the tasks of %s", candidate_text(one.row.candidate))
        return one.with_realized(measure(one.realized, one.row.candidate), cluster)

    chosen = _preferred(planned)[: limits.measure]
    planned = [measured(one) if one in chosen else one for one in planned]
    for _ in range((MOST_MEASURED - 1) * limits.measure):
        fitting = _fitting(planned)
        fastest = next((one for one in fitting if one.is_measured), None)
        left = next((one for one in fitting if not one.is_measured), None)
        scale = min(_measured_over_simulated(planned), 1.0)
        if left is None or (fastest and not may_be_as_fast(_scaled(left.row, scale), fastest.row)):
            break
        planned = [measured(one) if one is left else one for one in planned]
    scale = _measured_over_simulated(planned)
    return [
        one if one.is_measured else dataclasses.replace(one, row=_scaled(one.row, scale)) for one in planned
    ]


def _measured_over_simulated(planned: Iterable[_Planned]) -> float:
    ratios = [one.row.seconds / one.simulated for one in planned if one.is_measured and one.simulated]
    return statistics.median(ratios or [1.0])


def _scaled(row: Row, factor: float) -> Row:
    """The row with all times multiplied."""
    seconds = tuple(factor * of_stage for of_stage in row.prediction.stage_seconds)
    prediction = dataclasses.replace(row.prediction, seconds=factor * row.seconds, stage_seconds=seconds)
    return dataclasses.replace(row, prediction=prediction)


# Ranking.


def _preferred(planned: Iterable[_Planned]) -> list[_Planned]:
    """The candidates that can run: first the candidates that may be the fastest, by ``reasons.in_order``.

    If any candidate was measured, only measured candidates may be the fastest.
    """
    fitting = _fitting(planned)
    pool = [one for one in fitting if one.is_measured] or fitting
    sizes = [one.realized.size for one in pool if one.realized is not None]
    first = [pool[i] for i in in_order([one.row for one in pool], sizes)]
    return [*first, *(one for one in fitting if one not in first)]


def _ranking(planned: Sequence[_Planned], waiting: Sequence[Row], cluster: AnyCluster) -> Ranking:
    """Ranks planned candidates, and behind them the rows ``waiting``, whose costs only formulas say."""
    best = _preferred(planned)[0]
    scale = _measured_over_simulated(planned)

    def loser(row: Row, best_row: Row, prefix: str = "") -> Row:
        return dataclasses.replace(row, reason=prefix + slower_because(row, best_row))

    unplanned = [row for row in waiting if not shortage(row, cluster)]
    best_by_formula = dataclasses.replace(best.row, prediction=best.by_formula)
    ranked = (
        best.row,
        *(loser(one.row, best.row) for one in _fitting(planned) if one is not best),
        *(_scaled(loser(row, best_by_formula, "not planned; by the formulas "), scale) for row in unplanned),
        *(one.row for one in planned if one.row.reason),
        *(dataclasses.replace(row, reason=missing) for row in waiting if (missing := shortage(row, cluster))),
    )
    notes = []
    if measured := sum(one.is_measured for one in _fitting(planned)):
        notes.append(
            f"candidates whose tasks were measured: {measured}; the times of the others are multiplied by "
            f"{scale:.2f}, the median of measured over simulated times"
        )
    if unplanned:
        notes.append(
            f"candidates that were planned and simulated: {len(planned)}; of {len(unplanned)} more, formulas "
            "say the costs; simulate= sets how many are planned"
        )
    assert best.realized is not None, "the best candidate can run"
    return Ranking(relabelled(ranked), best.realized, tuple(notes))
