"""The work of a device for a task of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpmd.planner.curves import ProductWork, added


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """The work of a device for a task.

    Attributes:
      operations: multiplications and additions of products, and one for each element of other results.
      nbytes: bytes read from its memory and written to it.
      nbytes_beside: the bytes among them that equations other than products read and write.
      all_reduced: for each axis of the mesh, the bytes on the device of values that are all-reduced along it.
        A gathered value counts half of its whole size, as it takes half of the time.
      all_reduces: for each axis, the number of these values. One that a constraint gathers or scatters counts
        half, as it takes half of the messages.
      moved: for each axis, the bytes among ``all_reduced`` of values that are gathered, or summed and
        scattered.
      merged, merges: for each axis, the bytes and the number of the all-reduces that are saved if sums of
        all-reduced values are all-reduced once.
      kernels: the number of kernels, if each fusion is one.
      products: the products, by the names of ``Hardware.rates``.
      accumulated: the bytes among ``nbytes_beside`` of additions of a product to an argument with no further
        reader, such as the addition of a gradient to its accumulator.
      temporaries: the most bytes at once of values that are neither operands nor results.
    """

    operations: float = 0.0
    nbytes: float = 0.0
    nbytes_beside: float = 0.0
    all_reduced: Mapping[str, float] = dataclasses.field(default_factory=dict)
    all_reduces: Mapping[str, float] = dataclasses.field(default_factory=dict)
    temporaries: float = 0.0
    moved: Mapping[str, float] = dataclasses.field(default_factory=dict)
    merged: Mapping[str, float] = dataclasses.field(default_factory=dict)
    merges: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernels: float = 0.0
    products: Mapping[str, ProductWork] = dataclasses.field(default_factory=dict)
    accumulated: float = 0.0

    def __add__(self, other: DeviceWork) -> DeviceWork:
        """The work of two tasks, one after the other."""
        return DeviceWork(
            self.operations + other.operations,
            self.nbytes + other.nbytes,
            self.nbytes_beside + other.nbytes_beside,
            added_by_axis(self.all_reduced, other.all_reduced),
            added_by_axis(self.all_reduces, other.all_reduces),
            max(self.temporaries, other.temporaries),
            added_by_axis(self.moved, other.moved),
            added_by_axis(self.merged, other.merged),
            added_by_axis(self.merges, other.merges),
            self.kernels + other.kernels,
            added(self.products, other.products),
            self.accumulated + other.accumulated,
        )

    def times(self, count: int) -> DeviceWork:
        """The work of ``count`` repetitions, one after the other."""
        return dataclasses.replace(
            self,
            operations=count * self.operations,
            nbytes=count * self.nbytes,
            nbytes_beside=count * self.nbytes_beside,
            all_reduced=_times(count, self.all_reduced),
            all_reduces=_times(count, self.all_reduces),
            moved=_times(count, self.moved),
            merged=_times(count, self.merged),
            merges=_times(count, self.merges),
            kernels=count * self.kernels,
            accumulated=count * self.accumulated,
            products={name: work.times(count) for name, work in self.products.items()},
        )


def added_by_axis(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of two numbers for each axis."""
    return {axis: some.get(axis, 0) + others.get(axis, 0) for axis in sorted({*some, *others})}


def _times(count: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {axis: count * number for axis, number in numbers.items()}
