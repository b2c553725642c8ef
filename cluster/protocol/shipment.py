"""Programs as they travel to the actors: the resolved plan, and functions in JAX's export format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax import export

from mpmd.compat import export_two_bit_integers
from mpmd.ir.plan import Name, Plan
from mpmd.program import Function, Variant


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A program as it travels to the actors: the resolved plan, and the functions as exported bytes.

    ``compiled`` are the executables that the actors have compiled already, and whose functions do not travel.
    """

    plan: Plan
    exported: Mapping[str, bytes]
    constants: Mapping[Name, np.ndarray]
    compiled: Mapping[str, Variant]


def exported_function(name: str, exported: bytes) -> Function:
    """The function that was exported, under a name that profilers and compiler dumps show."""
    export_two_bit_integers()
    call = export.deserialize(bytearray(exported)).call

    def function(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(call(*arguments))

    function.__name__ = name
    return function
