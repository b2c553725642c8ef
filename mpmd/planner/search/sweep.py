"""The uniform sweep: estimates all ways to run a step, as if all stages took equally long.

The closed forms of the schedules give the step of every number of groups at once; so thousands of submeshes
are estimated in a second.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from mpmd.planner.collectives import INNERMOST_FIRST, Place, Submesh, message_link
from mpmd.planner.constraints import Constraints
from mpmd.planner.profile import Kind, Profile
from mpmd.planner.search.closed_forms import CLOSED_FORMS, takes
from mpmd.planner.search.layer_arrays import StepSettings
from mpmd.planner.search.partition import unevenness
from mpmd.planner.search.stages import CostModel
from mpmd.planner.shared_cores import time_together
from mpmd.schedules import FAMILIES, Schedule

Array = np.ndarray
MOST_PER_SETTINGS = 4
"""For how many numbers of groups a shape is found, each with the best schedule for it."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A candidate but for the cut into stages.

    Attributes:
      submeshes: of each group.
      seconds, nbytes: the estimates of a step, and of the memory of a device.
    """

    schedule: Schedule
    submeshes: tuple[Submesh, ...]
    settings: StepSettings
    seconds: float = math.nan
    nbytes: float = math.nan


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """What there is to choose from.

    Attributes:
      fixed: with what follows from it.
    """

    model: CostModel
    constraints: Constraints

    @property
    def profile(self) -> Profile:
        return self.model.profile

    @property
    def num_devices(self) -> int:
        return self.model.cluster.nodes * self.model.cluster.devices_per_node

    @property
    def family(self) -> str | None:
        """The name of the family of schedules, if it alone is fixed."""
        return self.constraints.schedule if isinstance(self.constraints.schedule, str) else None

    @functools.cached_property
    def numbers_of_microbatches(self) -> list[int]:
        """Those that divide the rows of the batch."""
        if self.constraints.num_microbatches is not None:
            return [self.constraints.num_microbatches]
        return divisors(self.profile.rows)

    @functools.cached_property
    def submeshes(self) -> list[Submesh]:
        """Those that all groups may have. Where each has its own, the smallest stands for them."""
        if self.constraints.submesh is not None:
            return [min(self._fixed_submeshes, key=lambda submesh: math.prod(submesh.values()))]
        sizes = [divisors(self.largest(kind), self.num_devices) for kind in INNERMOST_FIRST]
        found = (dict(zip(INNERMOST_FIRST, choice, strict=True)) for choice in itertools.product(*sizes))
        return [submesh for submesh in found if self._takes_devices(math.prod(submesh.values()))]

    @functools.cached_property
    def _fixed_submeshes(self) -> tuple[Submesh, ...]:
        return tuple(
            {kind: own.get(kind, 1) for kind in INNERMOST_FIRST} for own in self.constraints.submeshes
        )

    def of_groups(self, submesh: Submesh, groups: int) -> tuple[Submesh, ...]:
        """The submeshes of groups that have one like this, or each the one that is fixed for it."""
        each = isinstance(self.constraints.submesh, tuple)
        return self._fixed_submeshes if each else (submesh,) * groups

    def largest(self, kind: Kind) -> int:
        """The number that a number of devices along an axis has to divide."""
        if kind == "data":
            return self.profile.rows
        sizes = [layer.divisions[kind].largest for layer in self.profile.layers if kind in layer.divisions]
        return math.gcd(*sizes) if sizes else 1

    def _takes_devices(self, number: int) -> bool:
        """Whether a group may have so many: on several nodes, a part of a node or whole nodes."""
        per_node = self.model.cluster.devices_per_node
        if number > self.num_devices:
            return False
        return self.model.cluster.nodes == 1 or not (per_node % number and number % per_node)

    @functools.cached_property
    def unevenness(self) -> dict[str, Array]:
        """How uneven stages are at least, by their number, on one device."""
        one = self.model.group_settings(
            Place(0, {}), StepSettings(self.numbers_of_microbatches[-1], remat=False, fsdp=False)
        )
        layers = self.model.table(one).layers
        return {
            "seconds": unevenness(layers["forward"] + layers["backward"]),
            "held": unevenness(layers["weights"] + layers["gradients"] + layers["state"]),
            "residuals": unevenness(layers["residuals"]),
        }

    def divides(self, submeshes: tuple[Submesh, ...], num_microbatches: int) -> bool:
        """Whether the devices of each group divide the rows of a microbatch."""
        rows = self.profile.rows // num_microbatches
        return all(rows % submesh["data"] == 0 for submesh in submeshes)

    @property
    def rematerialised(self) -> list[bool]:
        if self.constraints.remat is not None:
            return [self.constraints.remat]
        return [False, True] if self.profile.has_backward and not self.profile.are_stages else [False]

    def settings(self, submeshes: tuple[Submesh, ...]) -> Iterator[StepSettings]:
        """All that groups with these submeshes may have in common."""
        sharded = self._sharded(any(submesh["data"] > 1 for submesh in submeshes))
        for number, remat, (fsdp, once) in itertools.product(
            self.numbers_of_microbatches, self.rematerialised, sharded
        ):
            if self.divides(submeshes, number):
                yield StepSettings(number, remat, fsdp, once)

    def _sharded(self, several: bool) -> list[tuple[bool, bool]]:
        """Whether weights are divided over ``data``, and gathered once; not along a single device."""
        choices = [(False, False), *([(True, False), (True, True)] if several else [])]
        if self.profile.decided is None:
            choices = choices[:2]  # a step without a loop is one task
        return [choice for choice in choices if self.constraints.fsdp in (None, choice[0])]

    @functools.cached_property
    def families(self) -> list[tuple[str, float]]:
        """Families of schedules, and numbers of stages per group."""
        if isinstance(self.constraints.schedule, Schedule):
            schedule = self.constraints.schedule
            return [(schedule.name, schedule.num_stages / schedule.mpmd_dim)]
        names = [name for name in CLOSED_FORMS if (name == "ForwardOnly") != self.profile.has_backward]
        most = len(self.profile.layers)
        numbers = sorted({*range(1, min(most, 4) + 1)} | {most // p for p in range(1, most + 1)})
        if self.family:
            return [(self.family, v) for v in numbers]
        return [(name, v) for name in names for v in numbers if takes(name, v)]

    def stands_alone(self, family: str, stages_per_group: float) -> bool:
        """Whether a family is one to look at with one group.

        All schedules take equally long there; the one that needs the least memory stands for them.
        """
        if self.constraints.schedule is not None:
            return True
        least = {"Std1F1B": 1, "Interleaved1F1B": 2, "ForwardOnly": 1}.get(family, math.inf)
        return stages_per_group >= least and (
            self.constraints.num_stages is not None or stages_per_group == 1
        )

    def schedule(self, family: str, num_stages: int, groups: int) -> Schedule | None:
        """The schedule of a family and size, if there is one for the layers and what is fixed."""
        constraints = self.constraints
        allowed = constraints.num_stages in (None, num_stages) and constraints.groups in (None, groups)
        if not allowed or num_stages > len(self.profile.layers):
            return None
        if isinstance(constraints.schedule, Schedule):
            return constraints.schedule
        try:
            return FAMILIES[family].build(groups, num_stages)
        except ValueError:
            return None


def divisors(number: int, most: float = math.inf) -> list[int]:
    """All divisors that are not greater than ``most``, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    found = {*small, *(number // divisor for divisor in small)}
    return sorted(divisor for divisor in found if divisor <= most)


def sweep(space: SearchSpace) -> list[Shape]:
    """The best shapes of each setting, the shortest step first, of those that fit by the estimate."""
    return sorted(_all_shapes(space, least=False), key=lambda shape: shape.seconds)


def smallest(space: SearchSpace) -> list[Shape]:
    """The shapes of each setting that need the least memory, the least first, whether they fit or not."""
    return sorted(_all_shapes(space, least=True), key=lambda shape: shape.nbytes)


def _all_shapes(space: SearchSpace, least: bool) -> Iterator[Shape]:
    forms = {number: _Forms.of(space, number) for number in space.numbers_of_microbatches}
    for submesh in space.submeshes:
        for settings in space.settings(space.of_groups(submesh, 1)):
            yield from _shapes(space, forms[settings.num_microbatches], submesh, settings, least)


@dataclasses.dataclass(frozen=True)
class _Forms:
    """Closed forms by family (with a number of stages per group), and by number of groups from 1 on.

    Attributes:
      work: by what the time of all layers for a microbatch is multiplied; infinite without a schedule.
      tasks: of a group for each microbatch.
      hops: messages from the first stage to the last one and back.
      in_flight: the mean over groups, in microbatches of all of a group's stages.
      seconds, held, residuals: what the largest group has at least of these, over the mean.
    """

    families: list[tuple[str, float]]
    groups: Array
    work: Array
    tasks: Array
    hops: Array
    in_flight: Array
    seconds: Array
    held: Array
    residuals: Array

    @staticmethod
    def of(space: SearchSpace, num_microbatches: int) -> _Forms:
        families, num_layers = space.families, len(space.profile.layers)
        groups = np.arange(1, min(num_layers, space.num_devices) + 1)
        shape = (len(families), len(groups))
        p = np.broadcast_to(groups, shape)
        v = np.broadcast_to(np.array([number for _, number in families])[:, None], shape)
        m = np.full(shape, num_microbatches)
        fills, in_flight, tasks = np.empty(shape), np.empty(shape), np.empty(shape)
        for row, (name, number) in enumerate(families):
            form = CLOSED_FORMS.get(name, CLOSED_FORMS["GPipe"])
            fills[row] = form.fill(p[row], v[row], m[row])
            in_flight[row] = form.in_flight(p[row], v[row], m[row])
            in_flight[row] -= form.spread(p[row], v[row], m[row]) / 2
            tasks[row] = number * (1 + space.profile.has_backward * (1 + form.split))
        possible = _possible(space, families, p, v)
        return _Forms(
            families,
            groups,
            work=np.where(possible, (m + fills) / p, math.inf),
            tasks=tasks,
            hops=2 * (v * p - 1) * (p > 1),
            in_flight=in_flight / p,
            **{
                name: 1 + (values[np.minimum(p * v, num_layers).astype(int) - 1] - 1) / v
                for name, values in space.unevenness.items()
            },
        )


def _possible(space: SearchSpace, families: list[tuple[str, float]], p: Array, v: Array) -> Array:
    constraints, num_layers = space.constraints, len(space.profile.layers)
    possible = p * v <= num_layers
    if constraints.num_stages is not None:
        possible &= p * v == constraints.num_stages
    if constraints.groups is not None:
        possible &= p == constraints.groups
    alone = np.array([[space.stands_alone(name, number)] for name, number in families])
    return possible & ((p > 1) | alone)


def _shapes(
    space: SearchSpace, forms: _Forms, submesh: Submesh, settings: StepSettings, least: bool
) -> Iterator[Shape]:
    model, size = space.model, math.prod(submesh.values())
    place = Place(0, submesh)
    table = model.table(model.group_settings(place, settings))
    total = {name: float(until[-1]) for name, until in table.until.items()}
    link = message_link(model.cluster, place, Place(size, submesh))
    hop = link.latency + float(table.layers["entering"].mean()) / link.bandwidth
    overhead = settings.num_microbatches * forms.tasks * model.cluster.task_overhead
    layers = total["forward"] + total["backward"]
    one = time_together(model.cluster, 1.0, size)
    together = time_together(model.cluster, forms.groups, size)
    seconds = (
        np.maximum(
            one * (layers * forms.work * forms.seconds + overhead),
            together * (layers * np.minimum(forms.work, settings.num_microbatches / forms.groups) + overhead),
        )
        + forms.hops * hop
        + together * total["step"] / forms.groups
    )
    held = (total["weights"] + total["gradients"] + total["state"]) / forms.groups
    # Where groups hold different numbers of residuals, layers move to those with room.
    residuals = total["residuals"] * forms.in_flight * forms.residuals
    nbytes = held * forms.held + residuals + table.layers["temporaries"].min()
    allowed = np.isfinite(seconds) & (forms.groups * size <= space.num_devices)
    if not least and not isinstance(space.constraints.submesh, tuple):
        allowed &= nbytes <= model.cluster.memory
    order = np.where(allowed, nbytes if least else seconds, math.inf)
    rows = order.argmin(axis=0)
    order = order.min(axis=0)
    best = np.argsort(order, kind="stable")[: 1 if least else MOST_PER_SETTINGS]
    for column in best[np.isfinite(order[best])]:
        row = rows[column]
        name, number = forms.families[row]
        groups = int(forms.groups[column])
        schedule = space.schedule(name, round(groups * number), groups)
        if schedule is not None:
            yield Shape(
                schedule,
                space.of_groups(submesh, groups),
                settings,
                float(seconds[row, column]),
                float(nbytes[row, column]),
            )
