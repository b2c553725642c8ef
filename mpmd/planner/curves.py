"""Times of operations by kind, dtype and size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from mpmd.validation import Fault, number_fault, shown

Amount = TypeVar("Amount", float, np.ndarray)

ProductKind = Literal["product", "batched_product", "convolution"]
"""Matrix products, such products along further dimensions that both operands have, and convolutions."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The rate of kernels by their size: a kernel of ``half`` operations runs at half of ``rate``.

    A kernel of ``n`` operations takes ``(n + half) / rate`` seconds. So a sum over kernels needs their number
    and the sum of their operations alone.

    Attributes:
      rate: operations per second of large kernels.
      half: operations.
    """

    rate: float
    half: float = 0.0

    def seconds(self, operations: Amount, kernels: Amount) -> Amount:
        """The seconds of so many kernels that have so many operations together."""
        return (operations + self.half * kernels) / self.rate


class ProductWork(NamedTuple):
    """The products of one kind and dtype: their operations, and the number of kernels."""

    operations: Any
    kernels: Any

    def times(self, count: float) -> ProductWork:
        """The products of ``count`` repetitions."""
        return ProductWork(count * self.operations, count * self.kernels)


def added(some: Mapping[str, ProductWork], others: Mapping[str, ProductWork]) -> dict[str, ProductWork]:
    """The products of two tasks, by name of their rate."""
    nothing = ProductWork(0.0, 0.0)
    names = dict.fromkeys([*some, *others])
    return {
        name: ProductWork(
            *(a + b for a, b in zip(some.get(name, nothing), others.get(name, nothing), strict=True))
        )
        for name in names
    }


def rate_name(kind: ProductKind, dtype: str) -> str:
    """The name of a rate in ``Hardware.rates``, such as ``"product bfloat16"``."""
    return f"{kind} {dtype}"


def rates_faults(rates: Any) -> list[Fault | None]:
    """The faults of the rates of a cluster."""
    what = "rates must be a dict of mpmd.planner.curves.Curve, by names such as 'product bfloat16'"
    if not isinstance(rates, dict) or not all(isinstance(name, str) for name in rates):
        return [TypeError(f"{what}, not {shown(rates)}")]
    faults: list[Fault | None] = []
    for name, curve in rates.items():
        kind, _, dtype = name.partition(" ")
        if kind not in get_args(ProductKind) or not dtype:
            faults.append(ValueError(f"{what}: no kind and dtype is {name!r}"))
        elif not isinstance(curve, Curve):
            faults.append(TypeError(f"{what}: {name!r} has {shown(curve)}"))
        else:
            of_curve = f"rates[{name!r}]"
            per_second = "a number of operations per second"
            faults.append(number_fault(f"{of_curve}.rate", curve.rate, per_second, above=0, finite=True))
            faults.append(number_fault(f"{of_curve}.half", curve.half, least=0, finite=True))
    return faults
