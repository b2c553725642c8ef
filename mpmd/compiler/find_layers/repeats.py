"""Finds the repetitions in a sequence: the blocks of a model, as runs of equal parts one behind the other."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

_MOST = 0.9
"""The least share of work in the repetitions of an alternative period, over the share of the period with
the most work."""

_LEAST = 0.1
"""The least share of a range's work that repetitions of layers have."""

_LEAST_OF_ALL = 0.02
"""The least share of all work of a range that is searched."""

_MUCH = 0.25
"""The least work of an element at which parts begin, over the work of the largest element."""

_LESS = 0.99
"""The most that a longer period may hand over, over a shorter one."""


@dataclasses.dataclass(frozen=True)
class Repeat:
    """``count`` equal parts of ``period`` elements each, from ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def ends(self) -> range:
        return range(self.start, self.stop + 1, self.period)


def find_runs(tokens: Sequence[int], work: Sequence[float], crossing: Sequence[int | None]) -> list[Repeat]:
    """The repetitions in a sequence that have most of its work, in order; they do not overlap.

    Parts begin where the fewest bytes are handed from one to the next. So a block of a residual network
    begins behind an addition, and the halves of a block that hand over more than whole blocks do are no
    parts.

    Args:
      tokens: a number for each element; equal elements have equal numbers.
      work: of each element.
      crossing: bytes handed over at each position; ``None`` where no part can end.
    """
    ids = np.asarray(tokens)
    before = np.concatenate([[0.0], np.cumsum(work)])
    all_runs: list[Repeat] = []
    pending = [(0, len(ids))]
    while pending:
        start, stop = pending.pop()
        if before[stop] - before[start] < _LEAST_OF_ALL * before[-1]:
            continue
        chosen = _best(ids[start:stop], before[start : stop + 1], crossing[start : stop + 1])
        if chosen:
            runs = [dataclasses.replace(run, start=start + run.start) for run in chosen]
            all_runs += runs
            edges = [start, *(edge for run in runs for edge in (run.start, run.stop)), stop]
            pending += zip(edges[::2], edges[1::2], strict=True)
    return sorted(all_runs, key=lambda run: run.start)


def _best(ids: np.ndarray, before: np.ndarray, crossing: Sequence[int | None]) -> list[Repeat]:
    """Among the periods that cover most of the work, chooses the period that passes the fewest bytes on,
    and returns its runs."""
    matches = {period: list(_matches(ids, period)) for period in range(1, len(ids) // 2 + 1)}
    share = {
        period: sum(_work_of(before, start, period, length) for start, length in repetitions)
        for period, repetitions in matches.items()
        if repetitions
    }
    largest = max(share.values(), default=0.0)
    if largest < _LEAST * (before[-1] - before[0]):
        return []
    best: tuple[float, list[Repeat]] | None = None
    work = np.diff(before)
    for period in sorted(period for period, covered in share.items() if covered >= _MOST * largest):
        rotated = [_rotated(start, period, length, work, crossing) for start, length in matches[period]]
        runs = [(cost, run) for cost, run in filter(None, rotated) if run.count > 1]
        covered = [_work_of(before, run.start, period, run.count * period) for _, run in runs]
        lost = sum(part / run.count for part, (_, run) in zip(covered, runs, strict=True))
        if not runs or sum(covered) + lost < _MOST * largest:
            continue
        cost = sum(cost * part for (cost, _), part in zip(runs, covered, strict=True)) / sum(covered)
        if best is None or cost < _LESS * best[0]:
            best = cost, [run for _, run in runs]
    return best[1] if best else []


def _matches(ids: np.ndarray, period: int) -> Iterator[tuple[int, int]]:
    """Repetitions of at least two parts of a period: the first element, and the number of elements."""
    equal = ids[:-period] == ids[period:]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if stop - start >= period:
            yield start, stop - start + period


def _work_of(before: np.ndarray, start: int, period: int, length: int) -> float:
    return float(before[start + length // period * period] - before[start])


def _rotated(
    start: int, period: int, length: int, work: np.ndarray, crossing: Sequence[int | None]
) -> tuple[float, Repeat] | None:
    """The run within a repetition that hands over least, on average; ``None`` if no part can end anywhere.

    Of several such runs, the first whose parts begin with much work is taken: a dense layer begins with its
    product.
    """
    costs: dict[int, float] = {}
    for first in range(start, start + min(period, length - period + 1)):
        known = [crossing[end] for end in _run(first, start, period, length).ends[1:-1]]
        if known and None not in known:
            costs[first] = statistics.fmean(cost for cost in known if cost is not None)
    if not costs:
        return None
    least = min(costs.values())
    best = [first for first, cost in costs.items() if cost == least]
    most = max(work[first] for first in best)
    chosen = next(first for first in best if work[first] >= _MUCH * most)
    return least, _run(chosen, start, period, length)


def _run(first: int, start: int, period: int, length: int) -> Repeat:
    return Repeat(first, period, (start + length - first) // period)
