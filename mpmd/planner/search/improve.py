"""Improves a candidate step by step: what is like it is simulated, and the best of that is taken.

What is like a candidate: the same groups, in either order, with another schedule; another number of
microbatches; rematerialisation or FSDP the other way; a layer in the neighbouring stage; another submesh for
a group, or for two of them. Where the stages are no longer the same, layers are cut anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import Submesh
from mpmd.planner.search.candidates import best_of_shape
from mpmd.planner.search.formula import Evaluation, evaluate
from mpmd.planner.search.layer_arrays import StepSettings
from mpmd.planner.search.sweep import SearchSpace, Shape

MOST_MOVES = 40
"""How many boundaries between stages are tried in a round: those between the most unequal stages."""

MOST_GROUPS = 8
"""Of more groups the submeshes are not changed one by one."""

MOST_STAGES_PER_GROUP = 4

MOST_SHAPES = 8
"""In how many ways groups are divided otherwise, where another number of microbatches needs that."""


def improved(space: SearchSpace, start: Evaluation, most_tasks: int) -> Evaluation:
    """The best that is found until so many tasks have been simulated.

    The best is the one that fits, or needs the least memory, and of those that fit the shortest step.
    """
    best, num_tasks, rounds_without = start, 0, 0
    for move in itertools.cycle(NEIGHBOUR_MOVES):
        found = []
        for evaluation in filter(None, move(space, best)):
            num_tasks += evaluation.num_tasks
            found.append(evaluation)
            if num_tasks >= most_tasks:
                break
        better = min(found, key=lambda evaluation: rank(space, evaluation), default=best)
        is_better = rank(space, better) < rank(space, best)
        best, rounds_without = (better, 0) if is_better else (best, rounds_without + 1)
        if rounds_without == len(NEIGHBOUR_MOVES) or num_tasks >= most_tasks:
            return best
    raise AssertionError("the rounds end")


def rank(space: SearchSpace, evaluation: Evaluation) -> tuple[float, float]:
    """The smaller, the better: the bytes that are missing, and the seconds."""
    missing = evaluation.prediction.memory.total - space.model.cluster.memory
    return max(0.0, missing), evaluation.seconds


def _shape(candidate: Candidate) -> Shape:
    return Shape(candidate.schedule, candidate.submeshes, StepSettings.of(candidate))


def _schedules(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    own = _shape(best.candidate)
    groups = len(own.submeshes)
    for family, stages_per_group in space.families:
        if groups == 1 or stages_per_group > MOST_STAGES_PER_GROUP:
            continue
        schedule = space.schedule(family, round(groups * stages_per_group), groups)
        if schedule is None:
            continue
        # Which end of the pipeline is to have the larger groups depends on the schedule.
        orders = [own.submeshes, own.submeshes[::-1]]
        one = orders[0] == orders[1] or space.constraints.submesh is not None
        for submeshes in orders[: 1 if one else 2]:
            if (schedule, submeshes) != (own.schedule, own.submeshes):
                yield best_of_shape(space, dataclasses.replace(own, schedule=schedule, submeshes=submeshes))


def _microbatches(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    numbers, own = space.numbers_of_microbatches, StepSettings.of(best.candidate)
    index = numbers.index(own.num_microbatches)
    for number in numbers[max(0, index - 2) : index + 3]:
        for submeshes in _dividing(space, best.candidate.submeshes, number):
            settings = dataclasses.replace(own, num_microbatches=number)
            if settings != own and settings in space.settings(submeshes):
                shape = dataclasses.replace(_shape(best.candidate), settings=settings, submeshes=submeshes)
                yield best_of_shape(space, shape)


def _dividing(
    space: SearchSpace, submeshes: tuple[Submesh, ...], num_microbatches: int
) -> Iterator[tuple[Submesh, ...]]:
    """The submeshes, or others of as many devices where these do not divide the rows of a microbatch."""
    wrong = [submesh for submesh in submeshes if not space.divides((submesh,), num_microbatches)]
    sizes = sorted({math.prod(submesh.values()) for submesh in wrong})
    options = [
        [
            s
            for s in space.submeshes
            if math.prod(s.values()) == size and space.divides((s,), num_microbatches)
        ]
        for size in sizes
    ]
    for chosen in itertools.islice(itertools.product(*options), MOST_SHAPES):
        of_size = dict(zip(sizes, chosen, strict=True))
        yield tuple(of_size[math.prod(own.values())] if own in wrong else own for own in submeshes)


def _flags(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    own = StepSettings.of(best.candidate)
    for settings in space.settings(best.candidate.submeshes):
        if settings != own and settings.num_microbatches == own.num_microbatches:
            yield best_of_shape(space, dataclasses.replace(_shape(best.candidate), settings=settings))


def _layers(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    candidate, times = best.candidate, best.prediction.stage_seconds
    if space.constraints.layers_per_stage is not None:
        return
    boundaries = sorted(range(1, len(times)), key=lambda b: (-abs(times[b - 1] - times[b]), b))
    for boundary in boundaries[:MOST_MOVES]:
        for source, target in ((boundary - 1, boundary), (boundary, boundary - 1)):
            layers = [*candidate.layers_per_stage]
            if layers[source] > 1:
                layers[source] -= 1
                layers[target] += 1
                changed = dataclasses.replace(candidate, layers_per_stage=tuple(layers))
                yield evaluate(space.model, changed)


def _submeshes(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    """Other submeshes for one group, and for two groups that give and take, or change places."""
    candidate = best.candidate
    groups = len(candidate.submeshes)
    if groups > MOST_GROUPS or space.constraints.submesh is not None:
        return
    options = [
        s for s in space.submeshes if math.prod(s.values()) * (groups - 1) < space.num_devices * groups
    ]
    for group, submesh in itertools.product(range(groups), options):
        yield _with_submeshes(space, candidate, {group: submesh})
    for one, other in itertools.combinations(range(groups), 2):
        changed = {one: candidate.submeshes[other], other: candidate.submeshes[one]}
        yield _with_submeshes(space, candidate, changed)
    if groups <= 3:
        for one, other in itertools.combinations(range(groups), 2):
            for pair in itertools.product(options, repeat=2):
                yield _with_submeshes(space, candidate, dict(zip((one, other), pair, strict=True)))


def _with_submeshes(space: SearchSpace, candidate: Candidate, changed: dict) -> Evaluation | None:
    submeshes = tuple(changed.get(group, own) for group, own in enumerate(candidate.submeshes))
    devices = sum(math.prod(submesh.values()) for submesh in submeshes)
    several = any(submesh["data"] > 1 for submesh in submeshes)
    if (
        submeshes == candidate.submeshes
        or devices > space.num_devices
        or (candidate.fsdp and not several)
        or not space.divides(submeshes, candidate.num_microbatches)
    ):
        return None
    return best_of_shape(space, dataclasses.replace(_shape(candidate), submeshes=submeshes))


NEIGHBOUR_MOVES: tuple[Callable[[SearchSpace, Evaluation], Iterator[Evaluation | None]], ...] = (
    _schedules,
    _layers,
    _submeshes,
    _microbatches,
    _flags,
)
