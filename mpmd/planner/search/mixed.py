"""Estimates pipelines over several pools, as if each group had layers in proportion to its speed.

With all layers a group would take ``t`` seconds for a microbatch. If layers are in proportion to speed, all
groups take ``T = 1 / sum(1 / t)``. A group whose memory holds a smaller share of the layers has that share,
and the others have more. The closed forms of the schedules then give the time of a step, as in ``sweep.py``.

The groups of a pool follow one another, so that few messages go between pools. Within a pool they are equal;
``improve.py`` changes that.

References: Guo et al., "Zorse: Optimizing LLM Training Efficiency on Heterogeneous GPU Clusters", 2025,
arXiv:2507.10392. Gao et al., "AdaPtis: Reducing Pipeline Bubbles with Adaptive Pipeline Parallelism on
Heterogeneous Models", 2025, arXiv:2509.23722.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import DeviceRange, message_link
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.sweep import Forms
from mpmd.planner.submesh import Submesh

MOST_PER_SETTINGS = 8
"""The most combinations of submeshes whose schedules are estimated, for each settings."""

MOST_ARRANGEMENTS = 64
"""The most ways to assign groups with given submeshes to pools."""

MOST_ORDERS = 6
"""The most orders of pools along the pipeline."""

_Setting = tuple[int, tuple[Remat, ...], bool, bool, bool]
_Groups = tuple[Submesh, ...]


class _Estimate(NamedTuple):
    """A candidate whose layers are not cut into stages yet, with its estimated cost.

    Attributes:
      seconds: seconds of a step; infinite if the layers do not fit.
      needed: the memory of all layers, over the memory of all groups.
    """

    candidate: Candidate
    seconds: float
    needed: float


def mixed(space: SearchSpace) -> list[Candidate]:
    """The best candidates of all settings with groups in several pools, the shortest step first, uncut."""
    fitting = [estimate for estimate in _estimates(space) if math.isfinite(estimate.seconds)]
    ordered = sorted(fitting, key=lambda estimate: estimate.seconds)
    return [candidate for estimate in ordered for candidate in _orders(space, estimate.candidate)]


def smallest_mixed(space: SearchSpace) -> list[Candidate]:
    """The same candidates, whether they fit or not, those first that need the least share of the memory."""
    ordered = sorted(_estimates(space), key=lambda estimate: estimate.needed)
    return [candidate for estimate in ordered for candidate in _orders(space, estimate.candidate)]


def _orders(space: SearchSpace, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with the pools in each order along the pipeline."""
    if isinstance(space.constraints.submesh, tuple):
        yield candidate
        return
    of_pools = [[*groups] for _, groups in itertools.groupby(candidate.submeshes, lambda s: s.pool)]
    for ordered in itertools.islice(itertools.permutations(of_pools), MOST_ORDERS):
        yield dataclasses.replace(candidate, submeshes=tuple(itertools.chain(*ordered)))


def _estimates(space: SearchSpace) -> Iterator[_Estimate]:
    if len(space.devices) == 1:
        return
    forms = {number: Forms.of(space, number) for number in space.numbers_of_microbatches}
    by_setting: dict[_Setting, list[tuple[float, Candidate]]] = {}
    for groups in _combinations(space):
        uncut = dataclasses.replace(space.alone(groups[0]), submeshes=groups)
        for variant in space.variants(uncut):
            ideal = _ideal_seconds(space, forms[variant.num_microbatches], variant)
            by_setting.setdefault(variant.settings, []).append((ideal, variant))
    for ideals in by_setting.values():
        for _, variant in sorted(ideals, key=lambda pair: pair[0])[:MOST_PER_SETTINGS]:
            yield from _of_schedules(space, forms[variant.num_microbatches], variant)


def _combinations(space: SearchSpace) -> Iterator[_Groups]:
    """Groups in several pools; of each pool equal ones, one pool behind the other."""
    most = len(space.profile.layers)
    if isinstance(space.constraints.submesh, tuple):
        fixed = space.fixed_submeshes(len(space.constraints.submesh))
        yield from (s for s in itertools.islice(fixed, MOST_ARRANGEMENTS) if len({x.pool for x in s}) > 1)
        return
    options = {pool: [*_of_pool(space, pool)] for pool in space.devices}
    for number in range(2, len(options) + 1):
        for pools in itertools.combinations(options, number):
            for chosen in itertools.product(*(options[pool] for pool in pools)):
                groups = tuple(itertools.chain(*chosen))
                if len(groups) <= most and space.constraints.groups in (None, len(groups)):
                    yield groups


def _of_pool(space: SearchSpace, pool: str) -> Iterator[_Groups]:
    """Yields equal groups of a pool: as many groups as the pool has devices for, or every number up to that
    if constraints fix the total."""
    for submesh in space.submeshes:
        if submesh.pool == pool:
            most = min(space.devices[pool] // submesh.num_devices, len(space.profile.layers))
            least = most if space.constraints.groups is None and space.constraints.submesh is None else 1
            for number in range(least, most + 1):
                yield (submesh,) * number


def _ideal_seconds(space: SearchSpace, forms: Forms, candidate: Candidate) -> float:
    """The seconds of a step with enough memory, under the schedule that fills and drains fastest."""
    groups = len(candidate.submeshes)
    layers = [_Layers.of(space, submesh, candidate) for submesh in candidate.submeshes]
    return _slowest(layers, [1.0] * groups) * groups * float(forms.work[:, groups - 1].min())


class _Layers(NamedTuple):
    """Costs of all layers of a step on one group.

    Attributes:
      seconds: seconds of forward and backward of a microbatch.
      step: seconds of a step outside the loop.
      overhead: seconds that a task takes in addition to its computation.
      room: bytes of a device that remain for weights, state, gradients and residuals.
      held: bytes of a device for weights, gradients and state, during the whole step.
      residuals: bytes of a device for the residuals of a microbatch.
    """

    seconds: float
    step: float
    overhead: float
    room: float
    held: float
    residuals: float

    @staticmethod
    def of(space: SearchSpace, submesh: Submesh, candidate: Candidate) -> _Layers:
        """The layers of a step on a group with the settings of a candidate."""
        model, pool = space.model, space.model.cluster.pool(submesh.pool)
        table = model.table(model.group_settings(DeviceRange(0, submesh), candidate))
        return _Layers(
            seconds=table.total("forward") + table.total("backward"),
            step=table.total("step"),
            overhead=pool.task_overhead,
            room=pool.memory - float(table.layers["temporaries"].min()),
            held=sum(map(table.total, ("weights", "gradients", "state"))),
            residuals=table.total("residuals"),
        )

    def most(self, in_flight: float) -> float:
        """The share of all layers that fits on the group with ``in_flight`` microbatches in flight."""
        needed = self.held + in_flight * self.residuals
        return max(0.0, self.room / needed) if needed else math.inf


def _of_schedules(space: SearchSpace, forms: Forms, candidate: Candidate) -> Iterator[_Estimate]:
    """Estimates the candidate under its fastest schedule, and under the schedule that needs the least
    memory."""
    groups = len(candidate.submeshes)
    layers = [_Layers.of(space, submesh, candidate) for submesh in candidate.submeshes]
    hop = _hop_seconds(space, candidate)
    estimates = []
    for row, (family, stages_per_group) in enumerate(forms.families):
        work = float(forms.work[row, groups - 1])
        if math.isinf(work):
            continue
        schedule = space.schedule(family, round(groups * stages_per_group), groups)
        if schedule is not None:
            # The closed form has microbatches in flight of a group with an equal share of the layers.
            most = [of_group.most(float(forms.in_flight[row, groups - 1]) * groups) for of_group in layers]
            slowest = _slowest(layers, most)
            overhead = candidate.num_microbatches * float(forms.tasks[row, groups - 1])
            seconds = (
                slowest * groups * work * float(forms.seconds[row, groups - 1])
                + max(of_group.overhead for of_group in layers) * overhead
                + float(forms.hops[row, groups - 1]) * hop
                + _slowest([of_group._replace(seconds=of_group.step) for of_group in layers], most)
            )
            scheduled = dataclasses.replace(candidate, schedule=schedule)
            estimates.append(_Estimate(scheduled, seconds, 1 / sum(most) if any(most) else math.inf))
    if estimates:
        best = min(estimates, key=lambda estimate: estimate.seconds)
        least = min(estimates, key=lambda estimate: estimate.needed)
        yield from [best] if best is least else [best, least]


def _slowest(layers: Sequence[_Layers], most: Sequence[float]) -> float:
    """The least seconds of the slowest group for a microbatch; infinite if the groups do not hold all layers.

    Args:
      most: the share of all layers that each group can have.
    """
    left, speed = 1.0, sum(1 / of_group.seconds for of_group in layers if of_group.seconds)
    if not speed:
        return 0.0
    # Groups are full in the order of the time that their most layers take.
    for limit, of_group in sorted(zip(most, layers, strict=True), key=lambda pair: pair[0] * pair[1].seconds):
        if limit * of_group.seconds * speed >= left:
            return left / speed
        left -= limit
        speed -= 1 / of_group.seconds
    return math.inf


def _hop_seconds(space: SearchSpace, candidate: Candidate) -> float:
    """The seconds of a message between two pools, of the size that layers have on average."""
    seconds = []
    for source, target in itertools.pairwise(dict.fromkeys(candidate.submeshes)):
        between = DeviceRange(0, source), DeviceRange(0, target)
        link = message_link(space.model.cluster, *between)
        table = space.model.table(space.model.group_settings(between[1], candidate))
        seconds.append(link.latency + float(table.layers["entering"].mean()) / link.bandwidth)
    return max(seconds)
