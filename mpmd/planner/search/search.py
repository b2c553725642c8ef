"""Searches for the best way to run a step on a cluster.

Of a small problem every candidate is looked at (``exhaustive.py``). Of others ``sweep.py`` estimates all
shapes; the most promising ones are cut into stages (``candidates.py``) and simulated (``formula.py``), groups
of different sizes are tried for them (``uneven.py``), and the best are improved (``improve.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from mpmd.planner.candidate import Row
from mpmd.planner.constraints import Constraints
from mpmd.planner.hardware import Hardware
from mpmd.planner.profile import Profile
from mpmd.planner.reasons import ranked, shortage
from mpmd.planner.search.alternatives import alternatives
from mpmd.planner.search.candidates import best_of_shape
from mpmd.planner.search.contradictions import combined, contradictions
from mpmd.planner.search.exhaustive import best_of_all, is_small
from mpmd.planner.search.formula import Evaluation
from mpmd.planner.search.improve import improved, rank
from mpmd.planner.search.infeasible import infeasible
from mpmd.planner.search.layer_arrays import StepSettings
from mpmd.planner.search.stages import CostModel
from mpmd.planner.search.sweep import SearchSpace, Shape, smallest, sweep
from mpmd.planner.search.uneven import uneven_submeshes
from mpmd.schedules import Schedule

OPEN = Constraints()

NUM_ROWS = 32


@dataclasses.dataclass(frozen=True)
class SearchBudget:
    """How much is searched, so that the time depends on the problem and not on the machine.

    Attributes:
      shapes, tasks: how many shapes of the sweep are simulated, until so many tasks are.
      settings: for how many combinations of microbatches, rematerialisation and FSDP, the best ones, groups
        of different sizes are tried.
      improved, tasks_each: how many candidates are improved, each until so many tasks are simulated.
      exhaustive: whether all candidates of a small problem are looked at.
    """

    shapes: int = 150
    tasks: int = 200_000
    settings: int = 4
    improved: int = 6
    tasks_each: int = 20_000
    exhaustive: bool = True


USUAL = SearchBudget()


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search finds.

    Attributes:
      rows: the best first; what does not fit last.
      exact: whether no candidate is better by the formulas. Otherwise there may be a better one.
      num_simulated: how many candidates were simulated.
    """

    rows: tuple[Row, ...]
    exact: bool
    num_simulated: int


def search(profile: Profile, cluster: Hardware, constraints: Constraints = OPEN) -> tuple[Row, ...]:
    """The rows of ``find``."""
    return find(profile, cluster, constraints).rows


def find(
    profile: Profile, cluster: Hardware, constraints: Constraints = OPEN, budget: SearchBudget = USUAL
) -> Found:
    """The best candidates, the shortest step first, and what they are compared with.

    Candidates that do not fit come last. The alternatives to a pipeline are among the rows, with labels:
    ``one device``, ``data parallel``, ``FSDP`` and ``tensor parallel``; other rows have none.

    Raises: ``ValueError`` for fixes that contradict one another, the step or the cluster, with all
      contradictions; and when nothing fits, with what is missing and the nearest that would fit.
    """
    constraints = combined(constraints, profile)
    if faults := [*contradictions(constraints, profile, cluster)]:
        raise ValueError("\n".join(faults))
    space = SearchSpace(CostModel(profile, cluster), constraints)
    exact = budget.exhaustive and is_small(space)
    found = [*_swept(space, budget)]
    found += best_of_all(space) if exact else [*_refined(space, found, budget)]
    alone = alternatives(space)
    known = {repr(evaluation.candidate) for _, evaluation in alone}
    others = {repr(evaluation.candidate): ("", evaluation) for evaluation in found}
    labelled = [pair for text, pair in others.items() if text not in known] + alone
    if all(shortage(evaluation.prediction, cluster) for _, evaluation in labelled):
        raise ValueError(infeasible(space))
    rows = [Row(evaluation.candidate, evaluation.prediction, label) for label, evaluation in labelled]
    return Found(ranked(rows, cluster, NUM_ROWS), exact, len(found) + len(alone))


def as_written(
    profile: Profile, cluster: Hardware, schedule: Schedule, constraints: Constraints = OPEN
) -> Row | None:
    """The best candidate with the schedule that the step has itself, whether it fits in memory or not.

    ``None`` where the schedule is not one for the step, what is fixed, or the number of devices.
    """
    constraints = combined(dataclasses.replace(constraints, schedule=schedule), profile)
    if any(contradictions(constraints, profile, cluster)):
        return None
    space = SearchSpace(CostModel(profile, cluster), constraints)
    found = _best_first(space, [*_swept(space, USUAL)])
    return Row(found[0].candidate, found[0].prediction, "as written") if found else None


def _swept(space: SearchSpace, budget: SearchBudget) -> Iterator[Evaluation]:
    """The best of the most promising shapes."""
    return _simulated(space, sweep(space)[: budget.shapes], budget.tasks)


def _simulated(space: SearchSpace, shapes: Iterable[Shape], most_tasks: int) -> Iterator[Evaluation]:
    num_tasks = 0
    for shape in shapes:
        if num_tasks < most_tasks and (evaluation := best_of_shape(space, shape)):
            num_tasks += evaluation.num_tasks
            yield evaluation


def _refined(space: SearchSpace, swept: list[Evaluation], budget: SearchBudget) -> Iterator[Evaluation]:
    """Groups of different sizes, and improvements of the best of all."""
    uneven = [*_simulated(space, _uneven_shapes(space, _best_first(space, swept), budget), budget.tasks)]
    yield from uneven
    starts = _unlike(_best_first(space, swept + uneven))
    if not starts or rank(space, starts[0])[0]:
        least = [*_simulated(space, smallest(space)[: 2 * budget.improved], budget.tasks)]
        starts = _unlike(_best_first(space, least + starts))
    for evaluation in starts[: budget.improved]:
        yield improved(space, evaluation, budget.tasks_each)


def _best_first(space: SearchSpace, found: list[Evaluation]) -> list[Evaluation]:
    return sorted(found, key=lambda evaluation: rank(space, evaluation))


def _unlike(ordered: list[Evaluation]) -> list[Evaluation]:
    """The best for each number of groups, then for each number of stages on them, then the others."""
    groups = {id(e) for e in {len(e.places): e for e in reversed(ordered)}.values()}
    stages = {id(e) for e in {(len(e.places), *_stages_per_group(e)): e for e in reversed(ordered)}.values()}
    return sorted(ordered, key=lambda e: (id(e) not in groups, id(e) not in stages))


def _uneven_shapes(space: SearchSpace, ordered: list[Evaluation], budget: SearchBudget) -> Iterator[Shape]:
    """The ways of the best candidates, with groups of different sizes and each way's schedules."""
    if space.constraints.submesh is not None:
        return
    families: dict[StepSettings, list[Evaluation]] = {}
    for evaluation in ordered:
        families.setdefault(StepSettings.of(evaluation.candidate), []).append(evaluation)
    for settings in [*families][: budget.settings]:
        schedules = {(e.candidate.schedule.name, *_stages_per_group(e)): None for e in families[settings]}
        for submeshes in uneven_submeshes(space, settings):
            for family, stages_per_group in [*schedules][:3]:
                num_stages = len(submeshes) * stages_per_group
                schedule = space.schedule(family, num_stages, len(submeshes))
                if schedule is not None:
                    yield Shape(schedule, submeshes, settings)


def _stages_per_group(evaluation: Evaluation) -> tuple[int]:
    schedule = evaluation.candidate.schedule
    return (max(1, schedule.num_stages // schedule.mpmd_dim),)
