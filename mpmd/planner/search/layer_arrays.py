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
from mpmd.planner.layer_profile import Division, Layer, LayerProfile, TaskWork
from mpmd.planner.submesh import INNERMOST_FIRST

Array = np.ndarray
"""A number for each layer."""

_WORK = ("operations", "nbytes", "nbytes_beside", "temporaries", "kernels")
TEMPORARIES = _WORK.index("temporaries")
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
class RecomputedArrays:
    """The numbers of ``Recomputation``: arrays by layer; the work as the numbers of ``TaskWork``."""

    residuals: Array
    reduced: Array
    work: tuple[Array, ...]
    products: Mapping[str, ProductWork]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerArrays:
    """A profile's numbers: arrays by layer, and tuples of arrays by axis, ``INNERMOST_FIRST``."""

    profile: LayerProfile

    @functools.cached_property
    def forward(self) -> tuple[Array, ...]:
        """The numbers of ``TaskWork``: operations, bytes, bytes beside products, temporaries, and kernels."""
        return self._work("forward")

    @functools.cached_property
    def backward(self) -> tuple[Array, ...]:
        """The numbers of ``TaskWork``, as of ``forward``."""
        return self._work("backward")

    def products(self, task: str) -> Mapping[str, ProductWork]:
        """The products of all layers' tasks, ``forward`` or ``backward``, by the names of their rates."""
        return self._products[task]

    def recomputed(self, policy: Remat) -> RecomputedArrays:
        """The bytes that layers keep, and the work that they do again, under a policy."""
        if policy not in self._recomputed:
            each = [layer.recomputation(policy) for layer in self.profile.layers]
            works = [one.work for one in each]
            self._recomputed[policy] = RecomputedArrays(
                residuals=_array(one.residuals for one in each),
                reduced=_array(one.reduced for one in each),
                work=_work_arrays(works),
                products=_products_of(works),
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
        }

    def _divisions(self, axis: int) -> list[Division]:
        layers: tuple[Layer, ...] = self.profile.layers
        return [layer.divisions.get(INNERMOST_FIRST[axis], _UNDIVIDED) for layer in layers]

    def _work(self, task: str) -> tuple[Array, ...]:
        return _work_arrays([getattr(layer, task) for layer in self.profile.layers])

    @functools.cached_property
    def _products(self) -> dict[str, dict[str, ProductWork]]:
        return {
            task: _products_of([getattr(layer, task) for layer in self.profile.layers])
            for task in ("forward", "backward")
        }


def _work_arrays(works: Sequence[TaskWork]) -> tuple[Array, ...]:
    return tuple(_array(getattr(work, name) for work in works) for name in _WORK)


def _products_of(works: Sequence[TaskWork]) -> dict[str, ProductWork]:
    names = dict.fromkeys(name for work in works for name in work.products)
    nothing = ProductWork(0.0, 0.0)
    return {
        name: ProductWork(
            *map(_array, zip(*(work.products.get(name, nothing) for work in works), strict=True))
        )
        for name in names
    }


def product(shares: Iterable[Array]) -> Array:
    """The share of values that are divided along several axes."""
    return math.prod(shares)  # type: ignore[return-value]


def _array(numbers: Iterable[float]) -> Array:
    return np.array([*numbers], dtype=float)
