"""The choices that a search has: submeshes, schedules, and settings of the step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import DeviceRange
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import Kind, LayerProfile
from mpmd.planner.search.closed_forms import CLOSED_FORMS, takes
from mpmd.planner.search.families import SLICED, build, family_of, with_options
from mpmd.planner.search.layer_arrays import GroupSettings
from mpmd.planner.search.partition import StageRangeCosts, unevenness
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import INNERMOST_FIRST, Submesh
from mpmd.schedules import Schedule, Std1F1B
from mpmd.simulate import Link

Array = np.ndarray

MOST_RANGE_COSTS = 256
"""The most settings of groups whose costs of ranges of layers are kept: matrices of layers by layers."""


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """The choices for a step on a cluster.

    Attributes:
      constraints: the user's, with all that follows from them.
    """

    model: CostModel
    constraints: Constraints

    @property
    def profile(self) -> LayerProfile:
        return self.model.profile

    @property
    def num_devices(self) -> int:
        return self.model.cluster.num_devices

    @functools.cached_property
    def devices(self) -> dict[str, int]:
        cluster = self.model.cluster
        return {name: cluster.pool(name).num_devices for name in cluster.pool_names}

    @property
    def family(self) -> str | None:
        return self.constraints.schedule if isinstance(self.constraints.schedule, str) else None

    @functools.cached_property
    def numbers_of_microbatches(self) -> list[int]:
        if self.constraints.num_microbatches is not None:
            return [self.constraints.num_microbatches]
        return divisors(self.profile.rows)

    @functools.cached_property
    def submeshes(self) -> list[Submesh]:
        """The submeshes that all groups may have; if constraints fix a submesh for each group, the smallest
        submesh.

        In a cluster of several kinds of devices, the list has the submeshes of every pool.
        """
        pools = self.model.cluster.pool_names
        if self.constraints.submesh is not None:
            smallest = min(self._fixed_submeshes, key=lambda submesh: submesh.num_devices)
            return [dataclasses.replace(smallest, pool=pool) for pool in pools]
        sizes = [divisors(self.largest(kind), self.num_devices) for kind in INNERMOST_FIRST]
        submeshes = [
            Submesh(model, sequence, data, pool)
            for pool in pools
            for model, sequence, data in itertools.product(*sizes)
        ]
        least = self.numbers_of_microbatches[0]
        return [one for one in submeshes if self._takes_devices(one) and self.divides((one,), least)]

    @functools.cached_property
    def _fixed_submeshes(self) -> tuple[Submesh, ...]:
        return tuple(map(Submesh.of, self.constraints.submeshes))

    def of_groups(self, submesh: Submesh, groups: int) -> tuple[Submesh, ...]:
        if not isinstance(self.constraints.submesh, tuple):
            return (submesh,) * groups
        return tuple(dataclasses.replace(fixed, pool=submesh.pool) for fixed in self._fixed_submeshes)

    def fixed_submeshes(self, groups: int) -> Iterator[tuple[Submesh, ...]]:
        fixed = self.of_groups(self.submeshes[0], groups)
        return self.in_pools(
            [[dataclasses.replace(submesh, pool=pool) for pool in self.devices] for submesh in fixed]
        )

    def in_pools(self, options: Sequence[Sequence[Submesh]]) -> Iterator[tuple[Submesh, ...]]:
        """All choices of a submesh for each group for which the pools have enough devices.

        Args:
          options: the submeshes that each group may have.
        """

        def extended(devices: Mapping[str, int], group: int) -> Iterator[tuple[Submesh, ...]]:
            if group == len(options):
                yield ()
                return
            for submesh in options[group]:
                left = {**devices, submesh.pool: devices[submesh.pool] - submesh.num_devices}
                if left[submesh.pool] >= 0 and sum(left.values()) >= len(options) - group - 1:
                    for rest in extended(left, group + 1):
                        yield (submesh, *rest)

        return extended(self.devices, 0)

    def largest(self, kind: Kind) -> int:
        return self.profile.largest(kind) or 1

    def _takes_devices(self, submesh: Submesh) -> bool:
        """Whether the pool has the submesh's devices, and they are a part of a node or whole nodes."""
        number, pool = submesh.num_devices, self.model.cluster.pool(submesh.pool)
        if number > pool.num_devices:
            return False
        return pool.nodes == 1 or not (pool.devices_per_node % number and number % pool.devices_per_node)

    @functools.cached_property
    def range_costs(self) -> Callable[[GroupSettings, Link], StageRangeCosts]:
        def of(group_settings: GroupSettings, link: Link) -> StageRangeCosts:
            table = self.model.table(group_settings)
            tasks = 1 + self.profile.has_backward
            devices = math.prod(group_settings.sizes)
            overhead = tasks * self.model.task_overhead(group_settings.pool, devices)
            hops = np.append(2 * (link.latency + table.layers["entering"] / link.bandwidth), 0.0)
            return StageRangeCosts.of(table, overhead, hops)

        return functools.lru_cache(MOST_RANGE_COSTS)(of)

    @functools.cached_property
    def unevenness(self) -> dict[str, Array]:
        """The least unevenness of stages on one device, by the number of stages."""
        submesh = Submesh(pool=self.model.cluster.pool_names[0])
        one_device = self.model.group_settings(DeviceRange(0, submesh), self.alone(submesh))
        layers = self.model.table(one_device).layers
        return {
            "seconds": unevenness(layers["forward"] + layers["backward"]),
            "held": unevenness(layers["weights"] + layers["gradients"] + layers["state"]),
            "residuals": unevenness(layers["residuals"]),
        }

    def divides(self, submeshes: tuple[Submesh, ...], num_microbatches: int) -> bool:
        rows = self.profile.rows // num_microbatches
        return all(rows % submesh.data == 0 for submesh in submeshes)

    def divides_between_regions(self, submesh: Submesh, num_microbatches: int) -> bool:
        if self.profile.between == "sequence":
            return self.largest("sequence") % (submesh.sequence * submesh.model) == 0
        return self.profile.rows // num_microbatches % (submesh.data * submesh.model) == 0

    def sequence_parallel(self, submeshes: tuple[Submesh, ...], num_microbatches: int) -> list[bool]:
        can_be = (
            self.profile.can_be_sequence_parallel
            and any(submesh.model > 1 for submesh in submeshes)
            and all(self.divides_between_regions(submesh, num_microbatches) for submesh in submeshes)
        )
        choices = [False, *[True] * can_be]
        return [choice for choice in choices if self.constraints.sequence_parallel in (None, choice)]

    @functools.cached_property
    def policies(self) -> list[tuple[Remat, ...]]:
        """The candidates' rematerialisation: one policy for all stages each, or the fixed policies."""
        if self.constraints.remat is not None:
            return [self.constraints.remat]
        can_be_cut = self.profile.has_backward and not self.profile.are_stages
        return [(policy,) for policy in self.profile.policies] if can_be_cut else [(Remat.NONE,)]

    def alone(self, submesh: Submesh) -> Candidate:
        """The whole step on one group, which has ``submesh`` unless the constraints fix another submesh."""
        number = self.numbers_of_microbatches[-1]
        return Candidate((), self.of_groups(submesh, 1), Std1F1B(1), number, (Remat.NONE,), fsdp=False)

    def variants(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with all settings that its groups may have, uncut."""
        sharded = self._sharded(any(submesh.data > 1 for submesh in candidate.submeshes))
        for number, remat, (fsdp, once) in itertools.product(
            self.numbers_of_microbatches, self.policies, sharded
        ):
            if self.divides(candidate.submeshes, number):
                for sequence_parallel in self.sequence_parallel(candidate.submeshes, number):
                    yield dataclasses.replace(
                        candidate,
                        layers_per_stage=(),
                        num_microbatches=number,
                        remat=remat,
                        fsdp=fsdp,
                        gather_once=once,
                        sequence_parallel=sequence_parallel,
                    )

    def _sharded(self, has_data_axis: bool) -> list[tuple[bool, bool]]:
        """The choices of ``fsdp`` with ``gather_once``; neither without several devices along ``data``."""
        choices = [(False, False), *([(True, False), (True, True)] if has_data_axis else [])]
        if self.profile.decision_index is None:
            choices = choices[:2]  # a step without a loop is one task
        return [choice for choice in choices if self.constraints.fsdp in (None, choice[0])]

    @functools.cached_property
    def families(self) -> list[tuple[str, float]]:
        """The families of schedules, each with a number of stages per group."""
        if isinstance(self.constraints.schedule, Schedule):
            schedule = self.constraints.schedule
            return [(family_of(schedule), schedule.num_stages / schedule.mpmd_dim)]
        names = [name for name in CLOSED_FORMS if (name == "ForwardOnly") != self.profile.has_backward]
        if self.profile.slices > 1 and self.profile.has_backward:
            names += SLICED
        most = len(self.profile.layers)
        numbers = sorted({*range(1, min(most, 4) + 1)} | {most // p for p in range(1, most + 1)})
        if self.family:
            return [(name, v) for name in with_options(self.family) for v in numbers]
        return [(name, v) for name in names for v in numbers if takes(name, v)]

    def stands_alone(self, family: str, stages_per_group: float) -> bool:
        """Whether a family is searched for one group.

        On one group all schedules take equally long, so only the schedule that needs the least memory is
        searched.
        """
        if self.constraints.schedule is not None:
            return True
        least = {"Std1F1B": 1, "Interleaved1F1B": 2, "ForwardOnly": 1}.get(family, math.inf)
        return stages_per_group >= least and (
            self.constraints.num_stages is not None or stages_per_group == 1
        )

    def schedule(self, family: str, num_stages: int, groups: int) -> Schedule | None:
        constraints = self.constraints
        allowed = constraints.num_stages in (None, num_stages) and constraints.groups in (None, groups)
        if not allowed or num_stages > len(self.profile.layers):
            return None
        if isinstance(constraints.schedule, Schedule):
            return constraints.schedule
        try:
            return build(family, groups, num_stages, self.profile.slices)
        except ValueError:
            return None


def divisors(number: int, most: float = math.inf) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = (number // divisor for divisor in small)
    return sorted(divisor for divisor in {*small, *large} if divisor <= most)
