"""The closed forms of all families of schedules, as arrays by family and number of groups."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from mpmd.planner.search.closed_forms import closed_form
from mpmd.planner.search.families import SLICED
from mpmd.planner.search.search_space import SearchSpace
from mpmd.schedules import Schedule

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Forms:
    """Closed forms for one number of microbatches: a row for each family, a column for each number of
    groups.

    Attributes:
      families: the families, each with a number of stages per group.
      slices: number of slices of a microbatch, for each family.
      work: the time of the loop, over the time of all layers for one microbatch; infinite without a schedule.
      tasks: number of tasks of a group for each microbatch.
      hops: messages from the first stage to the last one and back.
      in_flight: the mean over groups, in microbatches of all of a group's stages.
      seconds, held, residuals: the least share of the largest group in each, over the mean share.
    """

    families: list[tuple[str, float]]
    slices: Array
    work: Array
    tasks: Array
    hops: Array
    in_flight: Array
    seconds: Array
    held: Array
    residuals: Array

    @staticmethod
    def of(space: SearchSpace, num_microbatches: int) -> Forms:
        """The closed forms of all families of a search space, for all numbers of groups from 1 on."""
        families, num_layers = space.families, len(space.profile.layers)
        groups = np.arange(1, min(num_layers, space.num_devices) + 1)
        shape = (len(families), len(groups))
        p = np.broadcast_to(groups, shape)
        v = np.broadcast_to(np.array([number for _, number in families])[:, None], shape)
        stages = np.rint(p * v)  # 15 / 11 * 11 is not 15
        m = np.full(shape, num_microbatches)
        fills, in_flight, tasks = np.empty(shape), np.empty(shape), np.empty(shape)
        slices = np.array([[_slices(space, name)] for name, _ in families])
        for row, (name, number) in enumerate(families):
            form = closed_form(name, slices[row, 0])
            fills[row] = form.fill(p[row], v[row], m[row])
            in_flight[row] = form.in_flight(p[row], v[row], m[row])
            tasks[row] = slices[row, 0] * number * (1 + space.profile.has_backward * (1 + form.split))
        possible = _possible(space, families, p, stages)
        return Forms(
            families,
            slices,
            work=np.where(possible, (m + fills) / p, math.inf),
            tasks=tasks,
            hops=2 * (stages - 1) * (p > 1),
            in_flight=in_flight / p,
            **{
                name: 1 + (values[np.minimum(stages, num_layers).astype(int) - 1] - 1) / v
                for name, values in space.unevenness.items()
            },
        )

    def of_groups(self, groups: Array) -> Forms:
        arrays = ("work", "tasks", "hops", "in_flight", "seconds", "held", "residuals")
        return dataclasses.replace(self, **{name: getattr(self, name)[:, groups - 1] for name in arrays})


def _slices(space: SearchSpace, family: str) -> int:
    if isinstance(space.constraints.schedule, Schedule):
        return space.constraints.schedule.slices
    return space.profile.slices if family in SLICED else 1


def _possible(space: SearchSpace, families: list[tuple[str, float]], p: Array, stages: Array) -> Array:
    constraints, num_layers = space.constraints, len(space.profile.layers)
    possible = stages <= num_layers
    if constraints.num_stages is not None:
        possible &= stages == constraints.num_stages
    if constraints.groups is not None:
        possible &= p == constraints.groups
    alone = np.array([[space.stands_alone(name, number)] for name, number in families])
    return possible & ((p > 1) | alone)
