"""Searches for the best way to run a step on a cluster.

One heap holds candidates by the seconds that their steps take at least, or are estimated to take: candidates
whose layers are not cut yet (``estimates.py``), all candidates of a small problem (``exhaustive.py``), groups
of different sizes (``uneven.py``), and candidates with a policy of rematerialisation for each stage
(``stage_policies.py``). The first candidate of the heap is cut into stages (``candidates.py``) and simulated
(``formula.py``), until the next one is too slow by its key. Limits are numbers of candidates and of simulated
tasks, so that no clock decides.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.reasons import StepDoesNotFit, complexity, ranked, shortage
from mpmd.planner.search.alternatives import alternatives
from mpmd.planner.search.candidates import best_cut
from mpmd.planner.search.estimates import estimates
from mpmd.planner.search.exhaustive import every_candidate, is_small, lower_bound
from mpmd.planner.search.families import family_of
from mpmd.planner.search.forms import Forms
from mpmd.planner.search.orders import num_simulated_tasks
from mpmd.planner.search.refusals import combined, contradictions, infeasible
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stage_policies import best_by_stage, may_have_policies
from mpmd.planner.search.stages import CostModel
from mpmd.planner.search.uneven import uneven_submeshes
from mpmd.planner.submesh import Submesh
from mpmd.schedules import Schedule

OPEN = Constraints()

NUM_ROWS = 32

LEAST_CANDIDATES = 40
"""The number of estimates that are cut and simulated, however slow the next estimate is."""

MOST_TASKS = 400_000
"""The number of tasks that are simulated for the estimates."""

MOST_FURTHER_TASKS = 40_000
"""The number of tasks that are simulated for groups of different sizes, and again for other schedules."""

SLACK = 1.05
"""The search ends when the next estimate is 1.05 times the best step: estimates are as close as that."""

UNEVEN_SLACK = 1.1
"""``SLACK`` for groups of different sizes, which some schedules run faster than the bound of 1F1B."""

SMALL_SLACK = 1.25
"""The same for small problems: a candidate that is a little slower may be simpler, or faster by its plan."""

MOST_SETTINGS = 12
"""The most combinations of microbatches, rematerialisation and FSDP, the best first, for which groups of
different sizes are tried."""

MOST_FAMILIES = 5
"""The most schedules, the best first, under which groups of different sizes are tried."""

MOST_UNEQUAL = 4
"""The most candidates with groups of different sizes that are tried under all schedules."""

MOST_PLAIN = 8
"""The most candidates that are tried under 1F1B, too."""


def search(
    profile: LayerProfile, cluster: AnyCluster, constraints: Constraints = OPEN, exhaustive: bool = True
) -> tuple[Row, ...]:
    """The best candidates, the shortest step first, and the alternatives to a pipeline.

    Candidates that do not fit come last. The alternatives have labels: ``one device``, ``data parallel``,
    ``FSDP`` and ``tensor parallel``; other rows have none.

    Args:
      exhaustive: whether all candidates of a small problem are tried.

    Raises: ``ValueError`` for constraints that conflict with one another, the step or the cluster, with all
      conflicts; and when nothing fits, with the missing memory and the nearest that would fit.
    """
    space = search_space(profile, cluster, constraints)
    rows = evaluated_rows(space, exhaustive)
    if all(shortage(row, cluster) for row in rows):
        raise StepDoesNotFit(infeasible(space))
    return ranked(rows, cluster, NUM_ROWS)


def search_space(profile: LayerProfile, cluster: AnyCluster, constraints: Constraints) -> SearchSpace:
    """The choices that constraints leave. Raises ``ValueError`` with all conflicts among them."""
    constraints = combined(constraints, profile)
    if faults := [*contradictions(constraints, profile, cluster)]:
        raise ValueError("\n".join(faults))
    return SearchSpace(CostModel(profile, cluster), constraints)


def evaluated_rows(space: SearchSpace, exhaustive: bool = True) -> list[Row]:
    rows = [*_evaluations(space, exhaustive), *alternatives(space)]
    return [*{row.candidate: row for row in rows}.values()]


def as_written(
    profile: LayerProfile, cluster: AnyCluster, schedule: Schedule, constraints: Constraints
) -> Row | None:
    """The best candidate with the schedule that the step has itself, whether it fits in memory or not.

    ``None`` where the step, the constraints or the number of devices do not allow the schedule.
    """
    try:
        space = search_space(profile, cluster, dataclasses.replace(constraints, schedule=schedule))
    except ValueError:
        return None
    heap = _Heap(space)
    heap.walk_estimates()
    best = next(iter(heap.best_first()), None)
    return dataclasses.replace(best, label="as written") if best else None


def _evaluations(space: SearchSpace, exhaustive: bool) -> list[Row]:
    heap = _Heap(space)
    if exhaustive and is_small(space):
        heap.limit(math.inf)
        for candidate in every_candidate(space):
            heap.push(lower_bound(space, candidate), candidate)
        heap.walk(least=1, slack=SMALL_SLACK)
    else:
        heap.walk_estimates()
        heap.limit(MOST_FURTHER_TASKS)
        for seconds, candidate in _uneven(space, heap.best_first()):
            heap.push(seconds, candidate, by_stage=may_have_policies(space, candidate))
        heap.walk(slack=UNEVEN_SLACK)
        for seconds, candidate in _other_schedules(space, heap.best_first()):
            heap.push(seconds, candidate)
        heap.walk()
    heap.limit(MOST_FURTHER_TASKS)
    for candidate in _plain(space, heap.best_first()):
        heap.push(0.0, candidate)
    heap.walk(slack=1.0)
    return heap.evaluations


class _HeapEntry(NamedTuple):
    """A candidate of the heap; ``number`` keeps equal keys in order.

    Attributes:
      candidate: its layers are cut already, or not yet.
      by_stage: whether each stage gets the cheapest policy of rematerialisation with which its group fits.
    """

    key: float
    number: int
    candidate: Candidate
    by_stage: bool


class _Heap:
    """The candidates that wait, and the evaluations of the candidates that were tried."""

    def __init__(self, space: SearchSpace):
        self._space = space
        self._entries: list[_HeapEntry] = []
        self._pushed: set[tuple[Candidate, bool]] = set()
        self._num_tasks, self._most_tasks = 0, float(MOST_TASKS)
        self._shortest = math.inf  # the seconds of the best step that fits
        self.evaluations: list[Row] = []

    def push(self, key: float, candidate: Candidate, by_stage: bool = False) -> None:
        """Adds a candidate whose step takes about ``key`` seconds; once, if it is pushed again."""
        if (candidate, by_stage) not in self._pushed:
            self._pushed.add((candidate, by_stage))
            heapq.heappush(self._entries, _HeapEntry(key, len(self._pushed), candidate, by_stage))

    def limit(self, tasks: float) -> None:
        """Lets at most ``tasks`` more tasks be simulated."""
        self._most_tasks = self._num_tasks + tasks

    def walk_estimates(self) -> None:
        """Tries the fastest estimates; if none fits, the estimates that need the least memory."""
        found = estimates(self._space)
        for estimate in found.fastest:
            self.push(estimate.seconds, estimate.candidate)
        self.walk(LEAST_CANDIDATES)
        if math.isinf(self._shortest):
            self._entries.clear()
            for estimate in found.smallest:
                self.push(0.0, estimate.candidate)  # the first needs the least
            self.walk()

    def walk(self, least: int = 0, slack: float = SLACK) -> None:
        """Tries candidates until the next key is ``slack`` times the best step, and at least ``least`` have
        been tried."""
        while self._entries and self._num_tasks < self._most_tasks:
            if self._entries[0].key >= slack * self._shortest and len(self.evaluations) >= least:
                return
            entry = heapq.heappop(self._entries)
            if evaluation := (best_by_stage if entry.by_stage else best_cut)(self._space, entry.candidate):
                self._num_tasks += num_simulated_tasks(entry.candidate)
                self.evaluations.append(evaluation)
                is_short = evaluation.missing_bytes(self._space.model.cluster) > 0
                if not is_short:
                    self._shortest = min(self._shortest, evaluation.seconds)
                self._push_policies(entry, is_short)

    def _push_policies(self, entry: _HeapEntry, is_short: bool) -> None:
        space, candidate = self._space, entry.candidate
        if entry.by_stage or not may_have_policies(space, candidate):
            return
        if is_short or (candidate.is_rematerialised and not candidate.layers_per_stage):
            self.push(entry.key, dataclasses.replace(candidate, remat=space.policies[0]), by_stage=True)

    def best_first(self) -> list[Row]:
        def rank(evaluation: Row) -> tuple[float, float]:
            return max(0.0, evaluation.missing_bytes(self._space.model.cluster)), evaluation.seconds

        return sorted(self.evaluations, key=rank)


def _uneven(space: SearchSpace, ordered: list[Row]) -> Iterator[tuple[float, Candidate]]:
    """Yields uncut candidates with groups of different sizes, under the settings and schedules of the best
    candidates in ``ordered``, and the estimated seconds of their steps."""
    if space.constraints.submesh is not None:
        return
    cheapest, *others = space.policies
    by_settings: dict[Any, list[Candidate]] = {}
    for candidate in (evaluation.candidate for evaluation in ordered):
        uncut = dataclasses.replace(candidate, layers_per_stage=(), remat=cheapest)
        pools = {submesh.pool for submesh in candidate.submeshes}
        if len(pools) == 1:
            by_settings.setdefault((uncut.settings, *pools), []).append(uncut)
    for alike in [*by_settings.values()][:MOST_SETTINGS]:
        families = [*dict.fromkeys(_family(candidate) for candidate in alike)][:MOST_FAMILIES]
        for seconds, groups in uneven_submeshes(space, alike[0], others):
            for _, candidate in _under_schedules(space, alike[0], groups, 1.0, families):
                yield seconds, candidate


def _other_schedules(space: SearchSpace, ordered: list[Row]) -> Iterator[tuple[float, Candidate]]:
    """Yields the best candidates with groups of different sizes under all schedules, and the
    estimated seconds of their steps."""
    if space.constraints.submesh is not None:
        return
    unequal: dict[Any, Row] = {}
    for evaluation in ordered:
        candidate = evaluation.candidate
        if not _has_equal_groups(candidate) and candidate.remat in space.policies:
            unequal.setdefault((candidate.settings, candidate.submeshes), evaluation)
    for evaluation in [*unequal.values()][:MOST_UNEQUAL]:
        candidate, groups = evaluation.candidate, evaluation.candidate.submeshes
        forms = Forms.of(space, candidate.num_microbatches)
        of_own = float(forms.work[forms.families.index(_family(candidate)), len(groups) - 1])
        uncut = dataclasses.replace(candidate, layers_per_stage=())
        yield from _under_schedules(space, uncut, groups, evaluation.seconds / of_own, forms.families)


def _under_schedules(
    space: SearchSpace,
    candidate: Candidate,
    groups: tuple[Submesh, ...],
    seconds: float,
    families: Iterable[tuple[str, float]],
) -> Iterator[tuple[float, Candidate]]:
    """Yields the candidate on groups, in either order, under the families' schedules, with estimated seconds.

    Args:
      seconds: the estimated seconds, over the closed form of the schedule.
      families: the families, each with a number of stages per group.
    """
    forms = Forms.of(space, candidate.num_microbatches)
    for family, stages_per_group in families:
        work = float(forms.work[forms.families.index((family, stages_per_group)), len(groups) - 1])
        schedule = space.schedule(family, round(len(groups) * stages_per_group), len(groups))
        if schedule is not None and math.isfinite(work):
            # Which end of the pipeline is to have the larger groups depends on the schedule.
            for submeshes in (groups, groups[::-1]):
                yield seconds * work, dataclasses.replace(candidate, schedule=schedule, submeshes=submeshes)


def _plain(space: SearchSpace, ordered: list[Row]) -> Iterator[Candidate]:
    """Yields the best candidates with equal groups under 1F1B, whose estimates may be too slow."""
    if space.constraints.schedule is not None:
        return
    unusual = [
        evaluation.candidate
        for evaluation in ordered
        if complexity(evaluation.candidate).unusual_schedule
        and _has_equal_groups(evaluation.candidate)
        and evaluation.candidate.remat in space.policies
    ]
    for candidate in unusual[:MOST_PLAIN]:
        groups = len(candidate.submeshes)
        sizes = {"Std1F1B": groups, "Interleaved1F1B": candidate.schedule.num_stages}
        for family, num_stages in sizes.items():
            schedule = space.schedule(family, num_stages, groups)
            if schedule is not None:
                yield dataclasses.replace(candidate, layers_per_stage=(), schedule=schedule)


def _family(candidate: Candidate) -> tuple[str, float]:
    return family_of(candidate.schedule), candidate.schedule.num_stages / candidate.schedule.mpmd_dim


def _has_equal_groups(candidate: Candidate) -> bool:
    return len(set(candidate.submeshes)) == len({submesh.pool for submesh in candidate.submeshes})
