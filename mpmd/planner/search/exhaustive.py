"""Evaluates every candidate of a small problem, which finds the best one by the formulas.

Candidates are simulated in the order of a lower bound of their time: the time before the first task of a
group, the time of its tasks, and the time after its last task on its own devices or on the devices of the
first group. The search ends when the next bound is as long as the best step. A candidate that does not fit
without rematerialisation is also tried with a policy for each stage, which takes no less time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate
from mpmd.planner.search.formula import step_seconds
from mpmd.planner.search.orders import order_of
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stages import Stages
from mpmd.schedules import Schedule

MOST_CANDIDATES = 8_000

MOST_SUBMESHES = 300
MOST_STAGES = 8


def is_small(space: SearchSpace) -> bool:
    if len(space.submeshes) > MOST_SUBMESHES or len(space.profile.layers) > 4 * MOST_STAGES:
        return False
    numbers = (_num_cuts(space, candidate.schedule.num_stages) for candidate in _uncut(space))
    return all(number <= MOST_CANDIDATES for number in itertools.accumulate(numbers))


def lower_bound(space: SearchSpace, candidate: Candidate) -> float:
    """The least seconds of any schedule of a candidate's stages."""
    order = order_of(candidate.schedule, candidate.num_microbatches)
    stages = Stages(space.model, candidate, order.homes)
    number = candidate.num_passes
    forwards, backwards = stages.totals("forward"), stages.totals("backward")
    of_weights = stages.totals("backward_weights") if "bwdA" in order.kinds else [0.0] * len(forwards)
    per_stage = [
        forward + backward + len(order.kinds) * overhead
        for forward, backward, overhead in zip(forwards, backwards, stages.task_overheads, strict=True)
    ]
    work, steps = stages.of_groups(per_stage), step_seconds(stages)
    delayed = stages.of_groups(of_weights)
    bound = number * sum(work) / stages.groups_at_once
    for group, stages_of_group in enumerate(order.stages):
        before = range(stages_of_group[0])
        fill = sum(forwards[stage] for stage in before)
        drain = sum(backwards[stage] - of_weights[stage] for stage in before)
        spans = [number * work[group] + steps[group]]
        if order.kinds != {"fwd"}:
            # The backwards of the stages before follow, and then what the first group does after its loop.
            # The last tasks of a group may be gradients of weights, for which no other group waits.
            spans.append(number * (work[group] - delayed[group]) + drain + steps[order.homes[0]])
        bound = max(bound, fill + max(spans))
    return bound


def every_candidate(space: SearchSpace) -> Iterator[Candidate]:
    for uncut in _uncut(space):
        for layers in _cuts(space, uncut.schedule.num_stages):
            yield dataclasses.replace(uncut, layers_per_stage=layers)


def _uncut(space: SearchSpace) -> Iterator[Candidate]:
    constraints, num_layers = space.constraints, len(space.profile.layers)
    most, most_microbatches = min(num_layers, space.num_devices), space.numbers_of_microbatches[-1]
    for groups in [constraints.groups] if constraints.groups else range(1, most + 1):
        is_fixed = constraints.submesh is not None
        free = [space.submeshes] * groups
        for schedule in _schedules(space, groups):
            for submeshes in space.fixed_submeshes(groups) if is_fixed else space.in_pools(free):
                yield from space.variants(
                    Candidate((), submeshes, schedule, most_microbatches, (Remat.NONE,), fsdp=False)
                )


def _schedules(space: SearchSpace, groups: int) -> Iterator[Schedule]:
    for family, stages_per_group in space.families:
        num_stages = round(stages_per_group * groups)
        if groups > 1 or space.stands_alone(family, stages_per_group):
            schedule = space.schedule(family, num_stages, groups)
            if schedule is not None:
                yield schedule


def _cuts(space: SearchSpace, num_stages: int) -> Iterator[tuple[int, ...]]:
    if space.constraints.layers_per_stage is not None:
        yield space.constraints.layers_per_stage
        return
    num_layers = len(space.profile.layers)
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *inner, num_layers)))


def _num_cuts(space: SearchSpace, num_stages: int) -> int:
    if space.constraints.layers_per_stage is not None:
        return 1
    return math.comb(len(space.profile.layers) - 1, num_stages - 1)
