"""Improves a candidate by local search: its neighbours are simulated, and the best one is taken.

Neighbours of a candidate have: the same groups, in either order, with another schedule; another number of
microbatches; rematerialisation or FSDP the other way; a layer in the neighbouring stage; another submesh
for a group, or for two of them; one group in place of two neighbours, or a further one on idle devices.
Where the stages change, the layers are cut into stages again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from mpmd.planner.candidate import Candidate
from mpmd.planner.search.candidates import best_cut
from mpmd.planner.search.families import family_of
from mpmd.planner.search.formula import Evaluation, evaluate
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.submesh import Submesh

MOST_MOVES = 40
"""The most boundaries at which layers are moved in a round: those between the most unequal stages."""

MOST_GROUPS = 8
"""With more groups, submeshes of single groups are not changed."""

MOST_STAGES_PER_GROUP = 4

MOST_SUBMESHES = 8
"""The most other submeshes that are tried where another number of microbatches needs them."""


def improved(space: SearchSpace, start: Evaluation, most_tasks: int) -> Evaluation:
    """Moves to the best neighbour until no neighbour is better, or ``most_tasks`` tasks have been
    simulated.

    The best candidate fits in memory and has the shortest step; if none fits, it has the least memory.
    """
    best, num_tasks, rounds_without = start, 0, 0
    for move in itertools.cycle(NEIGHBOUR_MOVES):
        neighbours = []
        for evaluation in filter(None, move(space, best)):
            num_tasks += evaluation.num_tasks
            neighbours.append(evaluation)
            if num_tasks >= most_tasks:
                break
        better = min(neighbours, key=lambda evaluation: rank(space, evaluation), default=best)
        is_better = rank(space, better) < rank(space, best)
        best, rounds_without = (better, 0) if is_better else (best, rounds_without + 1)
        if rounds_without == len(NEIGHBOUR_MOVES) or num_tasks >= most_tasks:
            return best
    raise AssertionError("the rounds end")


def rank(space: SearchSpace, evaluation: Evaluation) -> tuple[float, float]:
    """The missing bytes, and the seconds; smaller is better."""
    return max(0.0, evaluation.missing_bytes(space.model.cluster)), evaluation.seconds


def _schedules(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    candidate = best.candidate
    groups = len(candidate.submeshes)
    for family, stages_per_group in space.families:
        if groups == 1 or stages_per_group > MOST_STAGES_PER_GROUP:
            continue
        schedule = space.schedule(family, round(groups * stages_per_group), groups)
        if schedule is None:
            continue
        # Which end of the pipeline is to have the larger groups depends on the schedule.
        orders = [candidate.submeshes, candidate.submeshes[::-1]]
        is_one_order = orders[0] == orders[1] or space.constraints.submesh is not None
        for submeshes in orders[: 1 if is_one_order else 2]:
            if (schedule, submeshes) != (candidate.schedule, candidate.submeshes):
                yield best_cut(space, dataclasses.replace(candidate, schedule=schedule, submeshes=submeshes))


def _microbatches(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    numbers, old = space.numbers_of_microbatches, best.candidate
    index = numbers.index(old.num_microbatches)
    for number in numbers[max(0, index - 2) : index + 3]:
        for submeshes in _dividing(space, old.submeshes, number):
            changed = dataclasses.replace(old, num_microbatches=number, submeshes=submeshes)
            allowed = (variant.settings for variant in space.variants(changed))
            if changed.settings != old.settings and changed.settings in allowed:
                yield best_cut(space, changed)


def _dividing(
    space: SearchSpace, submeshes: tuple[Submesh, ...], num_microbatches: int
) -> Iterator[tuple[Submesh, ...]]:
    """Yields ``submeshes`` with each submesh that does not divide the rows of a microbatch replaced by a
    submesh of the same size that does."""
    unfit = [submesh for submesh in submeshes if not space.divides((submesh,), num_microbatches)]
    sizes = sorted({_size(submesh) for submesh in unfit})
    options = [
        [s for s in space.submeshes if _size(s) == size and space.divides((s,), num_microbatches)]
        for size in sizes
    ]
    for chosen in itertools.islice(itertools.product(*options), MOST_SUBMESHES):
        of_size = dict(zip(sizes, chosen, strict=True))
        yield tuple(of_size[_size(s)] if s in unfit else s for s in submeshes)


def _size(submesh: Submesh) -> tuple[int, str]:
    """The number of devices, and their pool."""
    return submesh.num_devices, submesh.pool


def _flags(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    old = best.candidate
    for variant in space.variants(old):
        if variant.settings != old.settings and variant.num_microbatches == old.num_microbatches:
            yield best_cut(space, variant)


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
    """Other submeshes for one group, for two that swap theirs, and, of up to three groups, for any two."""
    candidate = best.candidate
    groups = len(candidate.submeshes)
    if groups > MOST_GROUPS or space.constraints.submesh is not None:
        return
    options = [s for s in space.submeshes if s.num_devices * (groups - 1) < space.num_devices * groups]
    for group, submesh in itertools.product(range(groups), options):
        yield _with_submeshes(space, candidate, {group: submesh})
    for one, other in itertools.combinations(range(groups), 2):
        changed = {one: candidate.submeshes[other], other: candidate.submeshes[one]}
        yield _with_submeshes(space, candidate, changed)
    if groups <= 3:
        for one, other in itertools.combinations(range(groups), 2):
            for pair in itertools.product(options, repeat=2):
                yield _with_submeshes(space, candidate, dict(zip((one, other), pair, strict=True)))


def _groups(space: SearchSpace, best: Evaluation) -> Iterator[Evaluation | None]:
    """One group in place of two neighbours, or a further one on idle devices, by the same family."""
    candidate, submeshes = best.candidate, best.candidate.submeshes
    if not 1 < len(submeshes) <= MOST_GROUPS or space.constraints.submesh is not None:
        return
    for changed in itertools.chain(_merged(space, submeshes), _extended(space, submeshes)):
        number = len(changed)
        num_stages = round(number * candidate.stages_per_group)
        schedule = space.schedule(family_of(candidate.schedule), num_stages, number)
        if schedule is not None and number > 1:
            yield _with_groups(space, dataclasses.replace(candidate, schedule=schedule), changed)


def _merged(space: SearchSpace, submeshes: tuple[Submesh, ...]) -> Iterator[tuple[Submesh, ...]]:
    for group, (first, second) in enumerate(itertools.pairwise(submeshes)):
        size = first.num_devices + second.num_devices
        for submesh in space.submeshes:
            if submesh.num_devices == size and submesh.pool == first.pool == second.pool:
                yield (*submeshes[:group], submesh, *submeshes[group + 2 :])


def _extended(space: SearchSpace, submeshes: tuple[Submesh, ...]) -> Iterator[tuple[Submesh, ...]]:
    idle = space.num_devices - sum(submesh.num_devices for submesh in submeshes)
    for submesh in space.submeshes:
        if submesh.num_devices <= idle:
            for group in range(len(submeshes) + 1):
                yield (*submeshes[:group], submesh, *submeshes[group:])


def _with_submeshes(space: SearchSpace, candidate: Candidate, changed: dict) -> Evaluation | None:
    submeshes = tuple(changed.get(group, old) for group, old in enumerate(candidate.submeshes))
    return _with_groups(space, candidate, submeshes)


def _with_groups(
    space: SearchSpace, candidate: Candidate, submeshes: tuple[Submesh, ...]
) -> Evaluation | None:
    has_data_axis = any(submesh.data > 1 for submesh in submeshes)
    if (
        submeshes == candidate.submeshes
        or not space.has_devices(submeshes)
        or (candidate.fsdp and not has_data_axis)
        or not space.divides(submeshes, candidate.num_microbatches)
        or candidate.sequence_parallel not in space.sequence_parallel(submeshes, candidate.num_microbatches)
    ):
        return None
    return best_cut(space, dataclasses.replace(candidate, submeshes=submeshes))


NEIGHBOUR_MOVES: tuple[Callable[[SearchSpace, Evaluation], Iterator[Evaluation | None]], ...] = (
    _schedules,
    _layers,
    _submeshes,
    _groups,
    _microbatches,
    _flags,
)
