"""The layers of a profile as arrays of numbers, and the share of each number that falls to a device of a
group."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpmd.language.remat import Remat
from mpmd.planner.collectives import AxisCosts
from mpmd.planner.curves import ProductWork
from mpmd.planner.layer_profile import AllReduces, Division, Layer, LayerProfile, TaskWork
from mpmd.planner.submesh import INNERMOST_FIRST

Array = np.ndarray
"""A number for each layer."""

_UNDIVIDED = Division(largest=1, operations=0.0, weights=0.0, activations=0.0)


@dataclasses.dataclass(frozen=True)
class GroupSettings:
    """The key of the costs of layers in a group: all on which they depend.

    Attributes:
      sizes: of the axes of its submesh, ``INNERMOST_FIRST``.
      collectives: the costs of exchanges along these axes.
      remat: the policy of the stages that the layers are in.
      num_passes, fsdp, gather_once, sequence_parallel: as of ``Candidate``.
      pool: of its submesh.
    """

    sizes: tuple[int, ...]
    collectives: tuple[AxisCosts, ...]
    num_passes: int
    remat: Remat
    fsdp: bool
    gather_once: bool
    pool: str = ""
    sequence_parallel: bool = False


@dataclasses.dataclass(frozen=True)
class TaskArrays:
    """The numbers of ``TaskWork``: arrays by layer."""

    operations: Array
    nbytes: Array
    nbytes_beside: Array
    temporaries: Array
    kernels: Array
    products: Mapping[str, ProductWork]

    @staticmethod
    def of(works: Sequence[TaskWork]) -> TaskArrays:
        """The arrays of the work of each layer."""
        nothing = ProductWork(0.0, 0.0)
        products = {
            name: ProductWork(
                *map(_array, zip(*(work.products.get(name, nothing) for work in works), strict=True))
            )
            for name in dict.fromkeys(name for work in works for name in work.products)
        }
        names = (field.name for field in dataclasses.fields(TaskArrays) if field.name != "products")
        return TaskArrays(*(_array(getattr(work, name) for work in works) for name in names), products)


@dataclasses.dataclass(frozen=True)
class RecomputedArrays:
    """The numbers of ``Recomputation``: arrays by layer."""

    residuals: Array
    work: TaskArrays
    reduced: Array


@dataclasses.dataclass(frozen=True, eq=False)
class LayerArrays:
    """A profile's numbers: arrays by layer, and tuples of arrays by axis, ``INNERMOST_FIRST``."""

    profile: LayerProfile

    @functools.cached_property
    def forward(self) -> TaskArrays:
        """The work of forwards."""
        return TaskArrays.of([layer.forward for layer in self.profile.layers])

    @functools.cached_property
    def backward(self) -> TaskArrays:
        """The work of backwards, without recomputed operations."""
        return TaskArrays.of([layer.backward for layer in self.profile.layers])

    def recomputed(self, policy: Remat) -> RecomputedArrays:
        """The bytes that layers keep, and the work that they do again, under a policy."""
        if policy not in self._recomputed:
            each = [layer.recomputation(policy) for layer in self.profile.layers]
            self._recomputed[policy] = RecomputedArrays(
                residuals=_array(one.residuals for one in each),
                work=TaskArrays.of([one.work for one in each]),
                reduced=_array(one.reduced for one in each),
            )
        return self._recomputed[policy]

    @functools.cached_property
    def _recomputed(self) -> dict[Remat, RecomputedArrays]:
        return {}

    def of(self, field: str) -> Array:
        """A field of each ``Layer``."""
        return self._numbers[field]

    def divided(self, field: str) -> tuple[Array, ...]:
        """A field of each layer's ``Division``, by axis."""
        return self._divided[field]

    def all_reduces(self, task: str) -> list[AllReduces]:
        """By axis, the all-reduces of each layer's ``forward`` or ``backward``."""
        return [
            AllReduces(*map(_array, zip(*(getattr(division, task) for division in divisions), strict=True)))
            for divisions in map(self._divisions, range(len(INNERMOST_FIRST)))
        ]

    def shares(self, field: str, sizes: tuple[int, ...]) -> list[Array]:
        """By axis, the share on each device of the values of which ``field`` is the divided share.

        Shares of several axes multiply.
        """
        return [1 - share + share / size for share, size in zip(self.divided(field), sizes, strict=True)]

    def rows(self, group: GroupSettings) -> float:
        """The rows of a pass, over the rows that the profile's numbers are for.

        A slice counts as a microbatch of as many tokens: it reads all weights, and adds to all gradients.
        """
        return self.profile.rows / group.num_passes / self.profile.microbatch_rows

    @functools.cached_property
    def _numbers(self) -> dict[str, Array]:
        fields = ("weights", "gradients", "state", "residuals", "entering")
        numbers = {field: _array(getattr(layer, field) for layer in self.profile.layers) for field in fields}
        gathered = (
            layer.weights if layer.gathered is None else layer.gathered for layer in self.profile.layers
        )
        return {**numbers, "gathered": _array(gathered)}

    @functools.cached_property
    def _divided(self) -> dict[str, tuple[Array, ...]]:
        return {
            field.name: tuple(
                _array(getattr(division, field.name) for division in self._divisions(axis))
                for axis in range(len(INNERMOST_FIRST))
            )
            for field in dataclasses.fields(Division)
            if field.name not in ("forward", "backward")
        }

    def _divisions(self, axis: int) -> list[Division]:
        layers: tuple[Layer, ...] = self.profile.layers
        return [layer.divisions.get(INNERMOST_FIRST[axis], _UNDIVIDED) for layer in layers]


def product(shares: Iterable[Array]) -> Array:
    """The share of values that are divided along several axes."""
    return math.prod(shares)  # type: ignore[return-value]


def _array(numbers: Iterable[float]) -> Array:
    return np.array([*numbers], dtype=float)
