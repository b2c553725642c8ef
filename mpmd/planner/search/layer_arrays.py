"""The numbers of a profile's layers as arrays, and the shares of them that a device of a group has."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np

from mpmd.planner.candidate import Candidate
from mpmd.planner.collectives import INNERMOST_FIRST, Submesh
from mpmd.planner.profile import Division, Layer, Profile
from mpmd.simulate import Link

Array = np.ndarray
"""A number for each layer."""

_UNDIVIDED = Division(largest=1, operations=0.0, weights=0.0, activations=0.0)


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What all groups of a candidate have in common; the attributes are those of ``Candidate``."""

    num_microbatches: int
    remat: bool
    fsdp: bool
    gather_once: bool = False

    @staticmethod
    def of(candidate: Candidate) -> StepSettings:
        """The way of a candidate."""
        return StepSettings(
            **{field.name: getattr(candidate, field.name) for field in dataclasses.fields(StepSettings)}
        )


@dataclasses.dataclass(frozen=True)
class GroupSettings:
    """How a group runs its layers.

    Attributes:
      sizes, links: of the axes of its submesh, ``INNERMOST_FIRST``; a link is the slowest one of its rings.
      step: those of all groups.
    """

    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    step: StepSettings


def group_settings_of(submesh: Submesh, links: tuple[Link, ...], settings: StepSettings) -> GroupSettings:
    """The setting of a group with a submesh."""
    sizes = tuple(submesh.get(kind, 1) for kind in INNERMOST_FIRST)
    return GroupSettings(sizes, links, settings)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerArrays:
    """The numbers of layers: arrays by layer, and tuples of those by axis, ``INNERMOST_FIRST``."""

    profile: Profile

    @functools.cached_property
    def forward(self) -> tuple[Array, ...]:
        """Operations, bytes, those of them beside products, and temporaries."""
        return self._work("forward")

    @functools.cached_property
    def backward(self) -> tuple[Array, ...]:
        """Operations, bytes, those of them beside products, and temporaries."""
        return self._work("backward")

    def of(self, field: str) -> Array:
        """A number of each layer."""
        return self._numbers[field]

    def divided(self, field: str) -> tuple[Array, ...]:
        """A number of each layer's divisions."""
        return self._divided[field]

    def shares(self, field: str, sizes: tuple[int, ...]) -> list[Array]:
        """By axis, the share that a device has of what the divisions' ``field`` says is divided.

        Shares of several axes multiply.
        """
        return [1 - share + share / size for share, size in zip(self.divided(field), sizes, strict=True)]

    def rows(self, group: GroupSettings) -> float:
        """The rows of a microbatch, over those that the profile is for."""
        return self.profile.rows / group.step.num_microbatches / self.profile.microbatch_rows

    @functools.cached_property
    def _numbers(self) -> dict[str, Array]:
        fields = ("weights", "gradients", "state", "residuals", "entering")
        return {field: _array(getattr(layer, field) for layer in self.profile.layers) for field in fields}

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

    def _work(self, field: str) -> tuple[Array, ...]:
        works = [dataclasses.astuple(getattr(layer, field)) for layer in self.profile.layers]
        return tuple(_array(numbers) for numbers in zip(*works, strict=True))


def product(shares: Iterable[Array]) -> Array:
    """The share of what is divided along several axes."""
    return math.prod(shares)  # type: ignore[return-value]


def _array(numbers: Iterable[float]) -> Array:
    return np.array([*numbers], dtype=float)
