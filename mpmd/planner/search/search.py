"""Searches for the best way to run a step on a cluster.

Every candidate of a small problem is evaluated (``exhaustive.py``). For a larger problem, ``sweep.py``
estimates all candidates before their layers are cut, and ``mixed.py`` the candidates with groups of several
kinds of devices. The most promising candidates are cut into stages (``candidates.py``) and simulated
(``formula.py``), also with groups of different sizes (``uneven.py``), and the best are improved
(``improve.py``). The best candidates that need rematerialisation also get a policy for each stage
(``stage_policies.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import LayerProfile
from mpmd.planner.pools import AnyCluster
from mpmd.planner.reasons import StepDoesNotFit, ranked, shortage
from mpmd.planner.search.alternatives import alternatives
from mpmd.planner.search.candidates import best_cut
from mpmd.planner.search.contradictions import combined, contradictions
from mpmd.planner.search.exhaustive import best_of_all, is_small
from mpmd.planner.search.families import family_of
from mpmd.planner.search.formula import Evaluation
from mpmd.planner.search.improve import improved, rank
from mpmd.planner.search.infeasible import infeasible
from mpmd.planner.search.mixed import mixed, smallest_mixed
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stage_policies import best_by_stage, may_have_policies
from mpmd.planner.search.stages import CostModel
from mpmd.planner.search.sweep import smallest, sweep
from mpmd.planner.search.uneven import uneven_submeshes
from mpmd.planner.simplicity import complexity
from mpmd.schedules import Schedule

OPEN = Constraints()

NUM_ROWS = 32

MOST_PLAIN = 8
"""The most candidates that are tried under 1F1B, too."""

MOST_BY_STAGE = 6
"""The most candidates that are tried with a policy for each stage, counted separately for candidates that
fit in memory and candidates that do not."""


@dataclasses.dataclass(frozen=True)
class SearchBudget:
    """Limits of a search, as numbers of tried candidates and simulated tasks, so that no clock decides.

    Attributes:
      uncut, tasks: numbers of candidates of the sweep that are cut, and of tasks that are simulated for
        them, at most.
      settings: number of combinations of microbatches, rematerialisation and FSDP, the best first, for
        which groups of different sizes are tried.
      improved, tasks_each: numbers of candidates that are improved, and of tasks that are simulated for
        each of these candidates, at most.
      exhaustive: whether all candidates of a small problem are evaluated.
    """

    uncut: int = 150
    tasks: int = 200_000
    settings: int = 4
    improved: int = 6
    tasks_each: int = 20_000
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
    swept = [*_swept(space, budget)]
    if budget.exhaustive and is_small(space):
        evaluations = swept + best_of_all(space)
    else:
        evaluations = swept + [*_refined(space, swept, budget)]
    evaluations += _simulated(space, _plain(space, _best_first(space, evaluations)), budget.tasks)
    evaluations += filter(None, _by_stage(space, _best_first(space, evaluations)))
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
    evaluations = _best_first(space, [*_swept(space, USUAL)])
    return Row(evaluations[0].candidate, evaluations[0].prediction, "as written") if evaluations else None


def _swept(space: SearchSpace, budget: SearchBudget) -> Iterator[Evaluation]:
    """The best cuts of the most promising candidates."""
    yield from _simulated(space, sweep(space)[: budget.uncut], budget.tasks)
    yield from _simulated(space, mixed(space)[: budget.uncut], budget.tasks)


def _simulated(space: SearchSpace, candidates: Iterable[Candidate], most_tasks: int) -> Iterator[Evaluation]:
    num_tasks = 0
    for candidate in candidates:
        if num_tasks < most_tasks and (evaluation := best_cut(space, candidate)):
            num_tasks += evaluation.num_tasks
            yield evaluation


def _refined(space: SearchSpace, swept: list[Evaluation], budget: SearchBudget) -> Iterator[Evaluation]:
    """Groups of different sizes, and improvements of the best of all."""
    uneven = [*_simulated(space, _uneven(space, _best_first(space, swept), budget), budget.tasks)]
    yield from uneven
    starts = _unlike(_best_first(space, swept + uneven))
    if not starts or rank(space, starts[0])[0]:
        uncut = smallest(space)[: 2 * budget.improved] + smallest_mixed(space)[: 2 * budget.improved]
        least = [*_simulated(space, uncut, budget.tasks)]
        starts = _unlike(_best_first(space, least + starts))
    for evaluation in starts[: budget.improved]:
        yield improved(space, evaluation, budget.tasks_each)


def _best_first(space: SearchSpace, evaluations: list[Evaluation]) -> list[Evaluation]:
    return sorted(evaluations, key=lambda evaluation: rank(space, evaluation))


def _unlike(ordered: list[Evaluation]) -> list[Evaluation]:
    """Reorders evaluations: first the best for each number of groups, then the best for each number of
    stages per group, then the rest."""
    worst_first = ordered[::-1]
    groups = {id(e) for e in {_num_groups(e): e for e in worst_first}.values()}
    stages = {
        id(e) for e in {(_num_groups(e), e.candidate.stages_per_group): e for e in worst_first}.values()
    }
    return sorted(ordered, key=lambda e: (id(e) not in groups, id(e) not in stages))


def _uneven(space: SearchSpace, ordered: list[Evaluation], budget: SearchBudget) -> Iterator[Candidate]:
    """Uncut candidates with groups of different sizes, and the settings and schedules of the best ones."""
    if space.constraints.submesh is not None:
        return
    by_settings: dict[Any, list[Candidate]] = {}
    for candidate in (evaluation.candidate for evaluation in ordered):
        pools = {submesh.pool for submesh in candidate.submeshes}
        if len(pools) == 1:
            by_settings.setdefault((candidate.settings, *pools), []).append(candidate)
    for alike in [*by_settings.values()][: budget.settings]:
        schedules = {(family_of(one.schedule), one.stages_per_group): None for one in alike}
        for submeshes in uneven_submeshes(space, alike[0]):
            for family, stages_per_group in [*schedules][:3]:
                num_stages = len(submeshes) * stages_per_group
                schedule = space.schedule(family, num_stages, len(submeshes))
                if schedule is not None:
                    yield dataclasses.replace(alike[0], schedule=schedule, submeshes=submeshes)


def _plain(space: SearchSpace, ordered: list[Evaluation]) -> Iterator[Candidate]:
    """The best candidates with equal groups, under 1F1B, for the case that no other schedule is faster.

    The sweep has only the best schedule of each size.
    """
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
                yield dataclasses.replace(candidate, schedule=schedule)


def _by_stage(space: SearchSpace, ordered: list[Evaluation]) -> Iterator[Evaluation | None]:
    """The best candidates that need rematerialisation or do not fit, with a policy for each stage."""
    uncut: dict[bool, dict[Candidate, None]] = {False: {}, True: {}}
    for evaluation in ordered:
        candidate, is_short = evaluation.candidate, rank(space, evaluation)[0] > 0
        is_rematerialised = candidate.is_rematerialised and candidate.remat in space.policies
        if may_have_policies(space, candidate) and (is_rematerialised or is_short):
            plain = dataclasses.replace(candidate, layers_per_stage=(), remat=space.policies[0])
            uncut[is_short].setdefault(plain)
    fitting, short = [*uncut[False]][:MOST_BY_STAGE], [*uncut[True]]
    further = [candidate for candidate in short if candidate not in fitting]
    for candidate in fitting + further[:MOST_BY_STAGE]:
        yield best_by_stage(space, candidate)


def _are_equal(candidate: Candidate) -> bool:
    """Whether the groups of each pool are equal."""
    return len(set(candidate.submeshes)) == len({submesh.pool for submesh in candidate.submeshes})


def _num_groups(evaluation: Evaluation) -> int:
    return len(evaluation.candidate.submeshes)
