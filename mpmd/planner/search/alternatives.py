"""The alternatives to a pipeline, which the table always has: one group, divided in one way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.layer_profile import Kind
from mpmd.planner.reasons import ALTERNATIVES
from mpmd.planner.search.candidates import best_cut, best_of
from mpmd.planner.search.search_space import SearchSpace, divisors
from mpmd.planner.submesh import Submesh
from mpmd.schedules import ForwardOnly, Interleaved1F1B, Schedule, Std1F1B


def alternatives(space: SearchSpace) -> Iterator[Row]:
    """Yields the fastest candidate of each alternative that the constraints and the cluster allow, even if it
    does not fit in memory."""
    if space.constraints.groups in (None, 1) and space.constraints.submesh is None:
        for kind, fsdp in ALTERNATIVES.values():
            if space.constraints.fsdp in (None, fsdp) and (evaluation := _best(space, kind, fsdp)):
                yield evaluation


def _best(space: SearchSpace, kind: Kind | None, fsdp: bool) -> Row | None:
    """The best number of microbatches, with as many devices as can be used."""
    schedule = _schedule_of_one_group(space)
    if schedule is None:
        return None
    evaluations = []
    for number, pool in itertools.product(space.numbers_of_microbatches, space.model.cluster.pool_names):
        largest = space.profile.rows // number if kind == "data" else space.largest(kind) if kind else 1
        of_node = space.model.cluster.pool(pool).devices_per_node
        sizes = divisors(largest, space.devices[pool])
        size = [size for size in sizes if size % -(-size // of_node) == 0][-1]
        if size == 1 and kind is not None:
            continue
        submesh = Submesh.of({kind: size} if kind else {}, pool)
        one_group = Candidate((), (submesh,), schedule, number, (Remat.NONE,), fsdp=fsdp)
        for candidate in space.variants(one_group):
            is_asked_for = (candidate.num_microbatches, candidate.fsdp) == (number, fsdp)
            if is_asked_for and (evaluation := best_cut(space, candidate)):
                evaluations.append(evaluation)
    return best_of(evaluations, space.model.cluster)


def _schedule_of_one_group(space: SearchSpace) -> Schedule | None:
    num_stages, schedule = space.constraints.num_stages or 1, space.constraints.schedule
    if isinstance(schedule, Schedule):
        return schedule if schedule.mpmd_dim == 1 else None
    if schedule is not None:
        return space.schedule(schedule, num_stages, 1)
    if not space.profile.has_backward:
        return ForwardOnly(num_stages, 1)
    return Std1F1B(1) if num_stages == 1 else Interleaved1F1B(num_stages, 1)
