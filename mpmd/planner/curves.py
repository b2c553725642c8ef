"""Times of operations by kind, dtype and size."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from mpmd.validation import Fault, number_fault, shown

Amount = TypeVar("Amount", float, np.ndarray)
Amounts = TypeVar("Amounts", bound=tuple[Any, ...])

ProductKind = Literal["product", "batched_product", "convolution"]
"""Matrix products, such products along further dimensions that both operands have, and convolutions."""

CollectiveKind = Literal["all_reduce", "all_gather"]
"""Sums with the result on each device, and gathers, which take as long as reductions that scatter."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The rate of kernels by their size: a kernel of ``half`` operations runs at half of ``rate``.

    A kernel of ``n`` operations takes ``(n + half) / rate`` seconds. So a sum over kernels needs their number
    and the sum of their operations alone. The size of a collective is the bytes of the whole value.

    Attributes:
      rate: operations per second of large kernels, or bytes per second of large collectives.
      half: operations or bytes.
    """

    rate: float
    half: float = 0.0

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Curve:
        """The curve through two kernels, each with its size and seconds; a constant if it would fall."""
        size, seconds = large
        if size > small[0] and seconds > small[1]:
            rate = (size - small[0]) / (seconds - small[1])
            half = small[1] * rate - small[0]
            if half > 0:
                return cls(rate, half)
        return cls(size / seconds)

    def seconds(self, operations: Amount, kernels: Amount) -> Amount:
        """Seconds for ``kernels`` kernels of ``operations`` operations in total."""
        return (operations + self.half * kernels) / self.rate


class ProductWork(NamedTuple):
    """The products of one kind and dtype: their operations, and the number of kernels."""

    operations: Any
    kernels: Any

    def times(self, count: float) -> ProductWork:
        return ProductWork(count * self.operations, count * self.kernels)


def added(some: Mapping[str, Amounts], others: Mapping[str, Amounts]) -> dict[str, Amounts]:
    """The sums of named tuples of numbers, by name."""
    sums = dict(some)
    for name, amounts in others.items():
        before = sums.get(name)
        sums[name] = amounts if before is None else type(amounts)(*map(operator.add, before, amounts))
    return sums


def collective_name(kind: CollectiveKind, size: int) -> str:
    return f"{kind} {size}"


def size_of_collective(name: str, kind: CollectiveKind) -> int | None:
    of_name, _, size = name.partition(" ")
    is_size = size.isascii() and size.isdecimal()
    return int(size) if of_name == kind and is_size and name == collective_name(kind, int(size)) else None


def without(rates: Mapping[str, Curve], kinds: Any) -> dict[str, Curve]:
    return {name: curve for name, curve in rates.items() if name.partition(" ")[0] not in get_args(kinds)}


def rates_faults(field: str, rates: Any) -> list[Fault | None]:
    what = (
        f"{field} must be a dict of mpmd.planner.curves.Curve, by names such as 'product bfloat16' and "
        "'all_reduce 8'"
    )
    if not isinstance(rates, dict) or not all(isinstance(name, str) for name in rates):
        return [TypeError(f"{what}, not {shown(rates)}")]
    faults: list[Fault | None] = []
    for name, curve in rates.items():
        if not _is_name(name):
            kinds = ", ".join((*get_args(ProductKind), *get_args(CollectiveKind)))
            faults.append(
                ValueError(f"{what}: {name!r} is none of {kinds}, with a dtype or a number of devices")
            )
        elif not isinstance(curve, Curve):
            faults.append(TypeError(f"{what}: {name!r} has {shown(curve)}"))
        else:
            unit = "bytes" if name.partition(" ")[0] in get_args(CollectiveKind) else "operations"
            per_second = f"a number of {unit} per second"
            of_curve = f"{field}[{name!r}]"
            faults.append(number_fault(f"{of_curve}.rate", curve.rate, per_second, above=0, finite=True))
            faults.append(number_fault(f"{of_curve}.half", curve.half, least=0, finite=True))
    return faults


def _is_name(name: str) -> bool:
    kind, _, dtype = name.partition(" ")
    sizes = [size_of_collective(name, kind) or 0 for kind in get_args(CollectiveKind)]
    return max(sizes) > 1 or (kind in get_args(ProductKind) and bool(dtype))
