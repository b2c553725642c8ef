"""The layers of a profile as arrays of numbers, and the share of each number that falls to a device of a
group."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpmd.language.remat import Remat
from mpmd.planner.collectives import AxisCosts
from mpmd.planner.curves import ProductWork
from mpmd.planner.layer_profile import Division, Kind, Layer, LayerProfile, Recomputation, TaskWork
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


@dataclasses.dataclass(frozen=True, eq=False)
class LayerArrays:
    """A profile's numbers as arrays: with a number for each layer.

    Attributes:
      sequence_parallel: whether values between tensor-parallel regions are divided along ``model``, too.
    """

    profile: LayerProfile
    sequence_parallel: bool = False

    @functools.cached_property
    def forward(self) -> TaskWork:
        return _stacked([layer.forward for layer in self.profile.layers])

    @functools.cached_property
    def backward(self) -> TaskWork:
        return _stacked([layer.backward for layer in self.profile.layers])

    def recomputed(self, policy: Remat) -> Recomputation:
        if policy not in self._recomputed:
            of_layers = [layer.recomputation(policy) for layer in self.profile.layers]
            self._recomputed[policy] = _stacked(of_layers)
        return self._recomputed[policy]

    @functools.cached_property
    def _recomputed(self) -> dict[Remat, Recomputation]:
        return {}

    @functools.cached_property
    def divisions(self) -> list[Division]:
        return [
            _stacked([self._division(layer, kind) for layer in self.profile.layers])
            for kind in INNERMOST_FIRST
        ]

    def _division(self, layer: Layer, kind: Kind) -> Division:
        if kind == "model" and self.sequence_parallel and layer.sequence_parallel is not None:
            return layer.sequence_parallel
        return layer.divisions.get(kind, _UNDIVIDED)

    def of(self, field: str) -> Array:
        """A field of each ``Layer``."""
        return self._numbers[field]

    def shares(self, field: str, sizes: tuple[int, ...]) -> list[Array]:
        """By axis, the share on each device of the values of which ``field`` is the divided share.

        Shares of several axes multiply.
        """
        divided = (getattr(division, field) for division in self.divisions)
        return [1 - share + share / size for share, size in zip(divided, sizes, strict=True)]

    def rows(self, group: GroupSettings) -> float:
        """The rows of a pass, over the rows that the profile's numbers are for.

        A slice counts as a microbatch of as many tokens: it reads all weights, and adds to all gradients.
        """
        return self.profile.rows / group.num_passes / self.profile.microbatch_rows

    @functools.cached_property
    def _numbers(self) -> dict[str, Array]:
        fields = ("weights", "gradients", "state", "residuals", "entering")
        layers = self.profile.layers
        numbers = {field: _stacked([getattr(layer, field) for layer in layers]) for field in fields}
        gathered = [layer.weights if layer.gathered is None else layer.gathered for layer in layers]
        return {**numbers, "gathered": _stacked(gathered)}


def _stacked(records: Sequence[Any]) -> Any:
    """The record whose numbers are arrays of the records' numbers.

    Mappings of products may have different names: a product without an entry has no work.
    """
    first = records[0]
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for record in records for name in record)
        nothing = ProductWork(0.0, 0.0)
        return {name: _stacked([record.get(name, nothing) for record in records]) for name in names}
    if isinstance(first, tuple):
        return type(first)(*map(_stacked, zip(*records, strict=True)))
    if isinstance(first, TaskWork | Recomputation | Division):
        fields = (field.name for field in dataclasses.fields(first))
        return type(first)(*(_stacked([getattr(record, field) for record in records]) for field in fields))
    return np.array(records, dtype=float)


def product(shares: Iterable[Array]) -> Array:
    """The share of values that are divided along several axes."""
    return math.prod(shares)  # type: ignore[return-value]
