"""The work of a device for a task of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpmd.planner.all_reduces import AllReduces
from mpmd.planner.curves import ProductWork, added


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """The work of a device for a task.

    Attributes:
      operations: multiplications and additions of products, and one for each element of other results.
      nbytes: bytes read from its memory and written to it.
      nbytes_beside: the bytes among them that equations other than products read and write.
      all_reduces: by axis of the mesh.
      kernels: the number of kernels, if each fusion is one.
      products: the products, by the names of ``Hardware.rates``.
      accumulated: the bytes among ``nbytes_beside`` of additions of a product to an argument with no further
        reader, such as the addition of a gradient to its accumulator.
      temporaries: the most bytes at once of values that are neither operands nor results.
    """

    operations: float = 0.0
    nbytes: float = 0.0
    nbytes_beside: float = 0.0
    all_reduces: Mapping[str, AllReduces] = dataclasses.field(default_factory=dict)
    temporaries: float = 0.0
    kernels: float = 0.0
    products: Mapping[str, ProductWork] = dataclasses.field(default_factory=dict)
    accumulated: float = 0.0

    def __add__(self, other: DeviceWork) -> DeviceWork:
        return DeviceWork(
            self.operations + other.operations,
            self.nbytes + other.nbytes,
            self.nbytes_beside + other.nbytes_beside,
            added(self.all_reduces, other.all_reduces),
            max(self.temporaries, other.temporaries),
            self.kernels + other.kernels,
            added(self.products, other.products),
            self.accumulated + other.accumulated,
        )

    def times(self, count: int) -> DeviceWork:
        return dataclasses.replace(
            self,
            operations=count * self.operations,
            nbytes=count * self.nbytes,
            nbytes_beside=count * self.nbytes_beside,
            all_reduces={axis: of_axis.times(count) for axis, of_axis in self.all_reduces.items()},
            kernels=count * self.kernels,
            accumulated=count * self.accumulated,
            products={name: work.times(count) for name, work in self.products.items()},
        )
