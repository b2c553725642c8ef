"""Searches for the best way to run a step on a cluster.

One heap holds candidates by the seconds that their steps take at least, or are estimated to take: candidates
whose layers are not cut yet (``estimates.py``), all candidates of a small problem (``exhaustive.py``), groups
of different sizes (``uneven.py``), and candidates with a policy of rematerialisation for each stage
(``stage_policies.py``). The first candidate of the heap is cut into stages (``candidates.py``) and simulated
(``formula.py``), until the next one is too slow by its key.
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
from mpmd.planner.reasons import StepDoesNotFit, ranked, shortage
from mpmd.planner.search.alternatives import alternatives
from mpmd.planner.search.candidates import best_cut
from mpmd.planner.search.contradictions import combined, contradictions
from mpmd.planner.search.estimates import estimates
from mpmd.planner.search.exhaustive import every_candidate, is_small, lower_bound
from mpmd.planner.search.families import family_of
from mpmd.planner.search.formula import Evaluation, evaluate
from mpmd.planner.search.infeasible import infeasible
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stage_policies import best_by_stage, may_have_policies, with_policies
from mpmd.planner.search.stages import CostModel
from mpmd.planner.search.uneven import uneven_submeshes
from mpmd.planner.simplicity import complexity
from mpmd.schedules import Schedule

OPEN = Constraints()

NUM_ROWS = 32

SLACK = 1.05
"""Estimates are this close: the search ends when the next one is 1.05 times the best step."""

MOST_SETTINGS = 12
"""The most combinations of microbatches, rematerialisation and FSDP, the best first, for which groups of
different sizes are tried."""

MOST_FAMILIES = 5
"""The most schedules, the best first, under which groups of different sizes are tried."""

MOST_PLAIN = 8
"""The most candidates that are tried under 1F1B, too."""


@dataclasses.dataclass(frozen=True)
class SearchBudget:
    """Limits of a search, as numbers of candidates and simulated tasks, so that no clock decides.

    Attributes:
      least: the number of candidates that are cut and simulated, whatever the next estimates are.
      tasks: the number of simulated tasks after which no further candidate is cut.
      exhaustive: whether all candidates of a small problem are tried.
    """

    least: int = 40
    tasks: int = 400_000
    exhaustive: bool = True


USUAL = SearchBudget()


def search(
    profile: LayerProfile, cluster: AnyCluster, constraints: Constraints = OPEN, budget: SearchBudget = USUAL
) -> tuple[Row, ...]:
    """The best candidates, the shortest step first, and the alternatives to a pipeline.

    Candidates that do not fit come last. The alternatives have labels: ``one device``, ``data parallel``,
    ``FSDP`` and ``tensor parallel``; other rows have none.

    Raises: ``ValueError`` for constraints that conflict with one another, the step or the cluster, with all
      conflicts; and when nothing fits, with the missing memory and the nearest that would fit.
    """
    space = search_space(profile, cluster, constraints)
    rows = evaluated_rows(space, budget)
    if all(shortage(row, cluster) for row in rows):
        raise StepDoesNotFit(infeasible(space))
    return ranked(rows, cluster, NUM_ROWS)


def search_space(profile: LayerProfile, cluster: AnyCluster, constraints: Constraints) -> SearchSpace:
    """The choices that constraints leave. Raises ``ValueError`` with all conflicts among them."""
    constraints = combined(constraints, profile)
    if faults := [*contradictions(constraints, profile, cluster)]:
        raise ValueError("\n".join(faults))
    return SearchSpace(CostModel(profile, cluster), constraints)


def evaluated_rows(space: SearchSpace, budget: SearchBudget) -> list[Row]:
    """All evaluated candidates, then the alternatives to a pipeline with their labels; in no order."""
    evaluations = _evaluations(space, budget)
    labelled = alternatives(space)
    known = {evaluation.candidate for _, evaluation in labelled}
    others = {evaluation.candidate: ("", evaluation) for evaluation in evaluations}
    unlabelled = [pair for candidate, pair in others.items() if candidate not in known]
    return [Row(e.candidate, e.prediction, label) for label, e in unlabelled + labelled]


def as_written(
    profile: LayerProfile, cluster: AnyCluster, schedule: Schedule, constraints: Constraints = OPEN
) -> Row | None:
    """The best candidate with the schedule that the step has itself, whether it fits in memory or not.

    ``None`` where the step, the constraints or the number of devices do not allow the schedule.
    """
    try:
        space = search_space(profile, cluster, dataclasses.replace(constraints, schedule=schedule))
    except ValueError:
        return None
    heap = _Heap(space, USUAL)
    heap.walk_estimates()
    best = next(iter(heap.best_first()), None)
    return Row(best.candidate, best.prediction, "as written") if best else None


def _evaluations(space: SearchSpace, budget: SearchBudget) -> list[Evaluation]:
    heap = _Heap(space, budget)
    if budget.exhaustive and is_small(space):
        for candidate in every_candidate(space):
            heap.push(lower_bound(space, candidate), candidate)
        heap.walk(least=1, slack=1.0)
    else:
        heap.walk_estimates()
        for seconds, candidate in _uneven(space, heap.best_first()):
            heap.push(seconds, candidate, by_stage=may_have_policies(space, candidate))
        heap.walk()
    for candidate in _plain(space, heap.best_first()):
        heap.push(0.0, candidate)
    heap.walk()
    return heap.evaluations


class _Entry(NamedTuple):
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

    def __init__(self, space: SearchSpace, budget: SearchBudget):
        self._space, self._budget = space, budget
        self._entries: list[_Entry] = []
        self._pushed: set[tuple[Candidate, bool]] = set()
        self._num_tasks = 0
        self._shortest = math.inf  # the seconds of the best step that fits
        self.evaluations: list[Evaluation] = []

    def push(self, key: float, candidate: Candidate, by_stage: bool = False) -> None:
        """Adds a candidate whose step takes about ``key`` seconds; once, if it is pushed again."""
        if (candidate, by_stage) not in self._pushed:
            self._pushed.add((candidate, by_stage))
            heapq.heappush(self._entries, _Entry(key, len(self._pushed), candidate, by_stage))

    def walk_estimates(self) -> None:
        """Tries the fastest estimates; if none fits, the estimates that need the least memory."""
        found = estimates(self._space)
        for estimate in found.fastest:
            self.push(estimate.seconds, estimate.candidate)
        self.walk(self._budget.least)
        if math.isinf(self._shortest):
            self._entries.clear()
            for estimate in found.smallest:
                self.push(estimate.needed, estimate.candidate)
            self.walk()

    def walk(self, least: int = 0, slack: float = SLACK) -> None:
        """Tries candidates until the next key is ``slack`` times the best step, and at least ``least`` have
        been tried."""
        while self._entries and self._num_tasks < self._budget.tasks:
            if self._entries[0].key >= slack * self._shortest and len(self.evaluations) >= least:
                return
            entry = heapq.heappop(self._entries)
            if evaluation := self._evaluate(entry):
                self._num_tasks += evaluation.num_tasks
                self.evaluations.append(evaluation)
                is_short = evaluation.missing_bytes(self._space.model.cluster) > 0
                if not is_short:
                    self._shortest = min(self._shortest, evaluation.seconds)
                self._push_policies(entry, is_short)

    def _evaluate(self, entry: _Entry) -> Evaluation | None:
        if entry.by_stage:
            return best_by_stage(self._space, entry.candidate)
        if entry.candidate.layers_per_stage:
            return evaluate(self._space.model, entry.candidate)
        return best_cut(self._space, entry.candidate)

    def _push_policies(self, entry: _Entry, is_short: bool) -> None:
        """Adds the tried candidate with a policy for each stage, if it needs any or does not fit."""
        space, candidate = self._space, entry.candidate
        if entry.by_stage or not may_have_policies(space, candidate) or candidate.remat not in space.policies:
            return
        if not candidate.layers_per_stage and (is_short or candidate.is_rematerialised):
            self.push(entry.key, dataclasses.replace(candidate, remat=space.policies[0]), by_stage=True)
        elif is_short and not candidate.is_rematerialised:
            by_stage = with_policies(space, candidate)
            if len(by_stage.remat) > 1:
                self.push(lower_bound(space, by_stage), by_stage)

    def best_first(self) -> list[Evaluation]:
        """The evaluations: those that fit first, then by the missing memory, then by the seconds."""

        def rank(evaluation: Evaluation) -> tuple[float, float]:
            return max(0.0, evaluation.missing_bytes(self._space.model.cluster)), evaluation.seconds

        return sorted(self.evaluations, key=rank)


def _uneven(space: SearchSpace, ordered: list[Evaluation]) -> Iterator[tuple[float, Candidate]]:
    """Uncut candidates with groups of different sizes, with the settings and schedules of the best ones; and
    the seconds that their steps take at least."""
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
        schedules = {(family_of(one.schedule), one.stages_per_group): None for one in alike}
        for seconds, groups in uneven_submeshes(space, alike[0], others):
            # Which end of the pipeline is to have the larger groups depends on the schedule.
            for submeshes in (groups, groups[::-1]):
                for family, stages_per_group in [*schedules][:MOST_FAMILIES]:
                    num_stages = len(submeshes) * stages_per_group
                    schedule = space.schedule(family, num_stages, len(submeshes))
                    if schedule is not None:
                        yield seconds, dataclasses.replace(alike[0], schedule=schedule, submeshes=submeshes)


def _plain(space: SearchSpace, ordered: list[Evaluation]) -> Iterable[Candidate]:
    """The best candidates with equal groups under 1F1B, which the estimates may have put too far behind."""
    if space.constraints.schedule is not None:
        return
    unusual = [
        e.candidate
        for e in ordered
        if complexity(e.candidate).unusual_schedule
        and _are_equal(e.candidate)
        and e.candidate.remat in space.policies
    ]
    for candidate in unusual[:MOST_PLAIN]:
        groups = len(candidate.submeshes)
        sizes = {"Std1F1B": groups, "Interleaved1F1B": candidate.schedule.num_stages}
        for family, num_stages in sizes.items():
            schedule = space.schedule(family, num_stages, groups)
            if schedule is not None:
                yield dataclasses.replace(candidate, layers_per_stage=(), schedule=schedule)


def _are_equal(candidate: Candidate) -> bool:
    """Whether the groups of each pool are equal."""
    return len(set(candidate.submeshes)) == len({submesh.pool for submesh in candidate.submeshes})
