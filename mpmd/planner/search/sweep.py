"""Estimates all ways to run a step, as if all stages took equally long.

The closed forms of the schedules give the time of a step for all numbers of groups at once; so thousands of
submeshes are estimated in a second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import DeviceRange, message_link
from mpmd.planner.search.closed_forms import closed_form
from mpmd.planner.search.families import SLICED
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stages import Table
from mpmd.planner.shared_cores import time_together
from mpmd.planner.submesh import Submesh
from mpmd.schedules import Schedule

Array = np.ndarray
MOST_PER_SETTINGS = 4
"""The most candidates for each settings: this many numbers of groups, each with its best schedule."""


class Estimate(NamedTuple):
    """A candidate that is not cut yet, with the estimated seconds of a step and bytes of a device."""

    candidate: Candidate
    seconds: float
    nbytes: float


def sweep(space: SearchSpace) -> list[Candidate]:
    """The best candidates of all settings that fit by the estimate, the shortest step first, uncut."""
    ordered = sorted(_estimates(space, least=False), key=lambda estimate: estimate.seconds)
    return [estimate.candidate for estimate in ordered]


def smallest(space: SearchSpace) -> list[Candidate]:
    """The candidate of each settings that needs least memory, whether it fits or not, the least first."""
    ordered = sorted(_estimates(space, least=True), key=lambda estimate: estimate.nbytes)
    return [estimate.candidate for estimate in ordered]


def _estimates(space: SearchSpace, least: bool) -> Iterator[Estimate]:
    forms = {number: Forms.of(space, number) for number in space.numbers_of_microbatches}
    for submesh in space.submeshes:
        for alone in space.variants(space.alone(submesh)):
            yield from _of_groups(space, forms[alone.num_microbatches], submesh, alone, least)


@dataclasses.dataclass(frozen=True)
class Forms:
    """Closed forms for one number of microbatches: a row for each family, a column for each number of
    groups.

    Attributes:
      families: the families, each with a number of stages per group.
      groups: the numbers of groups, from 1 on.
      work: the time of the loop, over the time of all layers for one microbatch; infinite without a schedule.
      slices: number of slices of a microbatch, for each family.
      tasks: number of tasks of a group for each microbatch.
      hops: messages from the first stage to the last one and back.
      in_flight: the mean over groups, in microbatches of all of a group's stages.
      seconds, held, residuals: the least share of the largest group in each, over the mean share.
    """

    families: list[tuple[str, float]]
    groups: Array
    work: Array
    slices: Array
    tasks: Array
    hops: Array
    in_flight: Array
    seconds: Array
    held: Array
    residuals: Array

    @staticmethod
    def of(space: SearchSpace, num_microbatches: int) -> Forms:
        """The closed forms of all families of a search space."""
        families, num_layers = space.families, len(space.profile.layers)
        groups = np.arange(1, min(num_layers, space.num_devices) + 1)
        shape = (len(families), len(groups))
        p = np.broadcast_to(groups, shape)
        v = np.broadcast_to(np.array([number for _, number in families])[:, None], shape)
        m = np.full(shape, num_microbatches)
        fills, in_flight, tasks = np.empty(shape), np.empty(shape), np.empty(shape)
        slices = np.array([[_slices(space, name)] for name, _ in families])
        for row, (name, number) in enumerate(families):
            form = closed_form(name, slices[row, 0])
            fills[row] = form.fill(p[row], v[row], m[row])
            in_flight[row] = form.in_flight(p[row], v[row], m[row])
            in_flight[row] -= form.spread(p[row], v[row], m[row]) / 2
            tasks[row] = slices[row, 0] * number * (1 + space.profile.has_backward * (1 + form.split))
        possible = _possible(space, families, p, v)
        return Forms(
            families,
            groups,
            work=np.where(possible, (m + fills) / p, math.inf),
            slices=slices,
            tasks=tasks,
            hops=2 * (v * p - 1) * (p > 1),
            in_flight=in_flight / p,
            **{
                name: 1 + (values[np.minimum(p * v, num_layers).astype(int) - 1] - 1) / v
                for name, values in space.unevenness.items()
            },
        )


def _slices(space: SearchSpace, family: str) -> int:
    """The slices into which the schedules of a family cut a microbatch."""
    if isinstance(space.constraints.schedule, Schedule):
        return space.constraints.schedule.slices
    return space.profile.slices if family in SLICED else 1


def _possible(space: SearchSpace, families: list[tuple[str, float]], p: Array, v: Array) -> Array:
    """Whether the layers and the constraints allow each family on each number of groups."""
    constraints, num_layers = space.constraints, len(space.profile.layers)
    possible = p * v <= num_layers
    if constraints.num_stages is not None:
        possible &= p * v == constraints.num_stages
    if constraints.groups is not None:
        possible &= p == constraints.groups
    alone = np.array([[space.stands_alone(name, number)] for name, number in families])
    return possible & ((p > 1) | alone)


def _of_groups(
    space: SearchSpace, forms: Forms, submesh: Submesh, alone: Candidate, least: bool
) -> Iterator[Estimate]:
    """Yields the best candidates whose groups have ``submesh``: the shortest steps, or the least memory.

    Args:
      alone: the step on a single group with ``submesh``, with the settings of the candidates.
      least: whether to yield the candidate with the least memory in place of the shortest steps.
    """
    size = submesh.num_devices
    table = space.model.table(space.model.group_settings(DeviceRange(0, submesh), alone))
    seconds = _step_seconds(space, forms, submesh, alone.num_microbatches, table)
    nbytes = _memory(forms, table)
    pool = space.model.cluster.pool(submesh.pool)
    allowed = np.isfinite(seconds) & (forms.groups * size <= pool.num_devices)
    if not least and not isinstance(space.constraints.submesh, tuple):
        allowed &= nbytes <= pool.memory
    ranks = np.where(allowed, nbytes if least else seconds, math.inf)
    best_family = ranks.argmin(axis=0)
    rank_of_groups = ranks.min(axis=0)
    best = np.argsort(rank_of_groups, kind="stable")[: 1 if least else MOST_PER_SETTINGS]
    for column in best[np.isfinite(rank_of_groups[best])]:
        row, groups = best_family[column], int(forms.groups[column])
        name, stages_per_group = forms.families[row]
        schedule = space.schedule(name, round(groups * stages_per_group), groups)
        submeshes = space.of_groups(submesh, groups)
        if schedule is not None and space.has_devices(submeshes):
            candidate = dataclasses.replace(alone, schedule=schedule, submeshes=submeshes)
            yield Estimate(candidate, float(seconds[row, column]), float(nbytes[row, column]))


def _step_seconds(
    space: SearchSpace, forms: Forms, submesh: Submesh, num_microbatches: int, table: Table
) -> Array:
    """The seconds of a step, for each family and number of groups."""
    cluster, size = space.model.cluster, submesh.num_devices
    link = message_link(cluster, DeviceRange(0, submesh), DeviceRange(size, submesh))
    hop = link.latency + float(table.layers["entering"].mean()) / link.bandwidth
    overhead = num_microbatches * forms.tasks * cluster.pool(submesh.pool).task_overhead
    layers = table.total("forward") + table.total("backward")
    alone = time_together(cluster, float(size))
    together = time_together(cluster, forms.groups * float(size))
    slowest_group = alone * (layers * forms.work * forms.seconds + overhead)
    all_groups = layers * np.minimum(forms.work, num_microbatches / forms.groups) + overhead
    return (
        np.maximum(slowest_group, together * all_groups)
        + forms.hops * hop
        + together * table.total("step") / forms.groups
    )


def _memory(forms: Forms, table: Table) -> Array:
    """The bytes of a device of the largest group, for each family and number of groups."""
    held = sum(map(table.total, ("weights", "gradients", "state"))) / forms.groups
    # Where groups hold different numbers of residuals, layers move to those with room.
    residuals = table.total("residuals") * forms.in_flight * forms.residuals
    return held * forms.held + residuals + table.layers["temporaries"].min() / forms.slices
