"""Ranks the best candidates of the formulas again, by simulations of their plans and by measured tasks."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from mpmd.errors import CompileError, StepWarning
from mpmd.planner.candidate import Candidate, Prediction, Row
from mpmd.planner.choice_table import candidate_text, time_text
from mpmd.planner.labels import relabelled
from mpmd.planner.pools import AnyCluster
from mpmd.planner.reasons import StepDoesNotFit, memory_share, shortage, slower_because
from mpmd.planner.simplicity import Option, complexity, in_order, may_be_as_fast
from mpmd.planner.trials.realize import Realized

_logger = logging.getLogger(__name__)

HOPELESS = 1.5
"""Candidates are not planned if their time by the formulas is over 1.5 times the best planned time."""

MOST_SEARCHES = 4
"""The most searches for less memory, when candidates fit by the formulas and their plans do not."""

MOST_MEASURED = 3
"""The most candidates that are measured, for each that was asked for."""

CONTENDERS = 1.1
"""Candidates within 1.1 times the fastest measured time are measured in turns.

A single measurement on a CPU that other processes use, too, may be off by as much.
"""

MOST_PLAN_SIZE = 50_000
"""The sum of ``Realized.size`` of all plans after which no further one is made, unless a time is given.

Such plans take about ten seconds. The limit is no time, so the answer depends on no machine and its load.
"""

Realize = Callable[[Candidate], Realized]
"""Compiles the plan of a candidate and simulates it. Raises ``CompileError``."""

Measure = Callable[[Realized, Candidate], Realized]
"""Measures the tasks of a plan, and predicts from these."""

Search = Callable[[float], Sequence[Row]]
"""The rows by formula for devices with a share of their memory. Raises ``ValueError`` if nothing fits."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of planning and measuring.

    Attributes:
      simulate: the number of candidates that are planned, beside the alternatives to a pipeline.
      seconds: the time after which no further one is planned; ``None``: planning ends at ``MOST_PLAN_SIZE``.
      measure: the number of candidates whose tasks are run at least.
      turns: how often those are measured that may be the fastest.
    """

    simulate: int
    seconds: float | None
    measure: int
    turns: int = 1


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The rows, the best first, the realized plan of the best, and notes for the user."""

    rows: tuple[Row, ...]
    winner: Realized
    notes: tuple[str, ...]


def rerank(
    search: Search, realize: Realize, measure: Measure, cluster: AnyCluster, limits: Limits
) -> Ranking:
    """Plans and simulates the best candidates and the alternatives to a pipeline, and ranks the plans.

    When the best candidates of the formulas do not fit by their plans, it goes on until a plan fits. If
    no plan fits, it searches as if devices had less memory, by the factor that the plan with the least memory
    lacks.

    Raises: ``ValueError`` when no candidate fits or can be compiled; as ``search`` for the whole memory.
    """
    reranking = _Reranking(cluster)
    share, rows = 1.0, search(1.0)
    waiting = reranking.simulate(rows, realize, limits)
    for _ in range(MOST_SEARCHES):
        if reranking.has_fitting or not reranking.least_needed:
            break
        share *= min(1 / reranking.least_needed, 0.95)
        try:
            rows = search(share)
        except ValueError:  # so much less memory is too little by the formulas, too
            break
        waiting = reranking.simulate(reranking.new(rows, share), realize, limits)
    reranking.measure(measure, limits.measure, limits.turns)
    return reranking.result(waiting, limits)


class _Reranking:
    """The planned candidates: ``_fitting`` can run, ``_refused`` lack memory or cannot be compiled."""

    def __init__(self, cluster: AnyCluster):
        self._cluster = cluster
        self._fitting: list[tuple[Row, Realized]] = []
        self._refused: list[Row] = []
        self._by_formula: dict[Candidate, Prediction] = {}
        self._simulated: dict[Candidate, float] = {}  # their seconds
        self._ratios: dict[Candidate, float] = {}  # of measured to simulated times
        self._count = 0  # of candidates that are to be planned
        self._size = 0  # of all plans so far

    @property
    def has_fitting(self) -> bool:
        """Whether the plan of any candidate fits."""
        return bool(self._fitting)

    @property
    def least_needed(self) -> float:
        """The least memory of a plan that does not fit, over the memory of devices; 0 if every plan fits."""
        needed = (memory_share(row, self._cluster) for row in self._refused)
        return min((share for share in needed if share > 1), default=0.0)

    def new(self, rows: Sequence[Row], share: float) -> list[Row]:
        """The rows of a search for a share of the memory whose candidates were not planned yet."""
        known, less = {row.candidate for row in self._refused}, self._cluster.with_memory(share)
        return [row for row in rows if row.candidate not in known and (row.label or not shortage(row, less))]

    def simulate(self, rows: Sequence[Row], realize: Realize, limits: Limits) -> list[Row]:
        """Plans and simulates the candidates of rows within the limits; returns the rows that are left."""
        end = math.inf if limits.seconds is None else time.monotonic() + limits.seconds
        least, in_order = self._in_order(rows)
        self._by_formula |= {row.candidate: row.prediction for row in rows}
        self._count = count = limits.simulate + sum(bool(row.label) for row in in_order[1:])
        for number, row in enumerate(in_order):
            is_late = self._is_over(end) and (number >= least or limits.seconds is not None)
            is_over = number >= count or is_late
            if (is_over and self._fitting) or shortage(row, self._cluster):
                return in_order[number:]
            if self._is_hopeless(row):
                return in_order[number:]
            self._simulate(row, realize)
        return []

    def _is_over(self, end: float) -> bool:
        """Whether the time is over, or, where no time is given, the plans are large enough."""
        return self._size > MOST_PLAN_SIZE if math.isinf(end) else time.monotonic() > end

    def _is_hopeless(self, row: Row) -> bool:
        """Whether a candidate by the formulas is much slower than the best one by its plan."""
        if row.label or not self._fitting:
            return False
        return row.prediction.seconds > HOPELESS * self._fitting[0][0].prediction.seconds

    def _in_order(self, rows: Sequence[Row]) -> tuple[int, list[Row]]:
        """Orders rows for planning; the number counts rows that are planned whatever the size of their plans.

        The best row comes first, then a simpler row that may be as fast, the alternatives to a pipeline, the
        remaining rows that fit, and the rows that lack memory.
        """
        fitting = [row for row in rows if not shortage(row, self._cluster)]
        first = [*fitting[:1], *_simpler(fitting)]
        rest = [row for row in fitting if row not in first]
        return len(first), [
            *first,
            *(row for row in rest if row.label),
            *(row for row in rest if not row.label),
            *(row for row in rows if shortage(row, self._cluster)),
        ]

    def _simulate(self, row: Row, realize: Realize) -> None:
        number = len(self._fitting) + len(self._refused) + 1
        best = f"; the best so far {time_text(self._fitting[0][0].prediction)}" if self._fitting else ""
        _logger.debug("planning candidate %d of at most %d%s", number, self._count, best)
        try:
            with warnings.catch_warnings():
                # The table has what such warnings say of a candidate.
                warnings.simplefilter("ignore", StepWarning)
                realized = realize(row.candidate)
        except CompileError as error:
            first = error.faults[0].splitlines()[0]
            self._refused.append(dataclasses.replace(row, reason=f"cannot be compiled: {first}"))
        else:
            self._size += realized.size
            self._simulated[row.candidate] = realized.prediction.seconds
            self._enter(row, realized)

    def _enter(self, row: Row, realized: Realized) -> None:
        row = dataclasses.replace(row, prediction=realized.prediction)
        missing = shortage(row, self._cluster)
        row = dataclasses.replace(row, reason=missing)
        if missing:
            self._refused.append(row)
        else:
            self._fitting.append((row, realized))
            self._fitting.sort(key=lambda entry: entry[0].prediction.seconds)

    def measure(self, measure: Measure, count: int, turns: int) -> None:
        """Measures ``count`` candidates, and more until no unmeasured candidate may be the fastest.

        A candidate may be the fastest if its simulated time, less its expected error, is below the fastest
        measured time. The test takes the simulated time as it is and scaled by the median of measured over
        simulated times, because a slow machine may not slow every candidate. At the end, the times of
        unmeasured candidates are scaled by this median.
        """
        if not self._fitting:
            return
        for entry in self._preferred()[:count]:
            self._measure_entry(entry, measure)
        for _ in range((MOST_MEASURED - 1) * count):
            fastest = next(filter(_is_measured, self._fitting), None)
            left = next((entry for entry in self._fitting if not _is_measured(entry)), None)
            if left is None or (fastest and not self._may_be_as_fast(left, fastest)):
                break
            self._measure_entry(left, measure)
        self._measure_in_turns(measure, turns)
        self._fitting = [
            entry if _is_measured(entry) else (self._scaled(entry[0]), entry[1]) for entry in self._fitting
        ]
        self._fitting.sort(key=lambda entry: entry[0].prediction.seconds)

    def _may_be_as_fast(self, entry: tuple[Row, Realized], measured: tuple[Row, Realized]) -> bool:
        prediction = entry[0].prediction.scaled(min(self._scale, 1.0))
        return may_be_as_fast(prediction, measured[0].prediction)

    def _measure_entry(self, entry: tuple[Row, Realized], measure: Measure) -> None:
        row, realized = entry
        _logger.debug("measuring the tasks of %s", candidate_text(row.candidate))
        self._enter_measured(entry, measure(realized, row.candidate))

    def _enter_measured(self, entry: tuple[Row, Realized], measured: Realized) -> None:
        row, _ = entry
        if simulated := self._simulated[row.candidate]:
            self._ratios[row.candidate] = measured.prediction.seconds / simulated
        self._fitting.remove(entry)
        self._enter(row, measured)

    def _measure_in_turns(self, measure: Measure, turns: int) -> None:
        """Measures those again that may be the fastest, so that a disturbance of the machine hits all alike.

        The median counts of the times of each, or the lower one of two.
        """
        measured = list(filter(_is_measured, self._fitting))
        limit = CONTENDERS * measured[0][0].prediction.seconds if measured else 0.0
        contenders = [entry for entry in measured if entry[0].prediction.seconds <= limit]
        if len(contenders) < 2:
            return
        results = [[realized] for _, realized in contenders]
        for _ in range(turns - 1):
            for (row, realized), of_row in zip(contenders, results, strict=True):
                of_row.append(measure(realized, row.candidate))
        for entry, of_row in zip(contenders, results, strict=True):
            of_row.sort(key=lambda realized: realized.prediction.seconds)
            self._enter_measured(entry, of_row[(len(of_row) - 1) // 2])

    @property
    def _scale(self) -> float:
        """The median of measured over simulated times; 1 if nothing is measured."""
        return statistics.median(self._ratios.values()) if self._ratios else 1.0

    def _scaled(self, row: Row) -> Row:
        return dataclasses.replace(row, prediction=row.prediction.scaled(self._scale))

    def result(self, waiting: Sequence[Row], limits: Limits) -> Ranking:
        """The ranking.

        Args:
          waiting: the rows whose costs are known from formulas alone.
        """
        if not self._fitting:
            raise self._nothing_can_be_run()
        (best, winner), *losers = self._preferred()[:1] + self._others()
        ranked = (
            best,
            *(
                dataclasses.replace(
                    row,
                    reason=slower_because(row.candidate, row.prediction, best.candidate, best.prediction),
                )
                for row, _ in losers
            ),
            *(
                dataclasses.replace(self._scaled(row), reason=self._unplanned_because(row, best))
                for row in waiting
                if not shortage(row, self._cluster)
            ),
            *self._refused,
            *(
                dataclasses.replace(row, reason=missing)
                for row in waiting
                if (missing := shortage(row, self._cluster))
            ),
        )
        return Ranking(relabelled(ranked), winner, tuple(self._notes(waiting, limits)))

    def _unplanned_because(self, row: Row, best: Row) -> str:
        """The reason why an unplanned candidate is slower than the best, by the formulas' times."""
        of_best = self._by_formula.get(best.candidate, best.prediction)
        reason = slower_because(row.candidate, row.prediction, best.candidate, of_best)
        return f"not planned; by the formulas {reason}"

    def _preferred(self) -> list[tuple[Row, Realized]]:
        """Sorts ``_fitting``: first the candidates that may be the fastest, by ``simplicity.in_order``.

        If any candidate was measured, only measured candidates may be the fastest.
        """
        pool = [entry for entry in self._fitting if _is_measured(entry)] or self._fitting
        options = [
            Option(row.candidate, row.prediction.seconds, row.prediction.expected_error, realized.size)
            for row, realized in pool
        ]
        first = [pool[i] for i in in_order(options)]
        return [*first, *(entry for entry in self._fitting if not any(entry is other for other in first))]

    def _others(self) -> list[tuple[Row, Realized]]:
        """The candidates that fit, less the best one, the fastest first."""
        best = self._preferred()[0]
        return [entry for entry in self._fitting if entry is not best]

    def _nothing_can_be_run(self) -> ValueError:
        """The error when no candidate can be run: the least memory of a plan, and refusals to compile."""
        lines = []
        short = [row for row in self._refused if shortage(row, self._cluster)]
        if short:
            least = min(short, key=lambda row: memory_share(row, self._cluster))
            text = candidate_text(least.candidate)
            lines.append(f"{text}, which needs least of those that were planned, {least.reason}")
            lines.append("give devices more memory, take more of them, or fix less")
        lines += dict.fromkeys(row.reason for row in self._refused if row not in short)
        text = "no candidate can be run:\n  " + "\n  ".join(lines)
        return StepDoesNotFit(text) if short else ValueError(text)

    def _notes(self, waiting: Sequence[Row], limits: Limits) -> Iterator[str]:
        measured = sum(map(_is_measured, self._fitting))
        if measured:
            yield (
                f"the tasks of {measured} candidates were measured; the times of the others are multiplied "
                f"by {self._scale:.2f}, the median of measured over simulated times"
            )
        done = len(self._fitting) + len(self._refused)
        fitting = [row for row in waiting if not shortage(row, self._cluster)]
        if not fitting:
            return
        text = f"{done} candidates were planned and simulated; of {len(fitting)} more, formulas say the costs"
        if done < self._count and not self._is_hopeless(fitting[0]):
            timed = limits.seconds is not None
            over = f"{limits.seconds:g} seconds were over" if timed else "their plans are large"
            text += f" ({over}; with more seconds= more are planned)"
        yield text


def _simpler(fitting: Sequence[Row]) -> list[Row]:
    """The simplest row among the rows that may be as fast as the first row, if it is simpler than the first.

    Of several rows that are equally simple, returns the row with the fewest tasks, the fastest to plan.
    """
    equal = [row for row in fitting[1:] if may_be_as_fast(row.prediction, fitting[0].prediction)]
    simplest = min(
        equal, key=lambda row: (complexity(row.candidate), _num_tasks(row.candidate)), default=None
    )
    if simplest is None or complexity(simplest.candidate) >= complexity(fitting[0].candidate):
        return []
    return [simplest]


def _num_tasks(candidate: Candidate) -> int:
    """Stages times passes through each stage, summed over loops."""
    return sum(loop.schedule.num_stages * loop.num_passes for loop in candidate.loops)


def _is_measured(entry: tuple[Row, Realized]) -> bool:
    return entry[0].prediction.source == "measurement"
