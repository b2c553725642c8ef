"""Programs as they travel to the actors: the resolved plan, and functions in JAX's export format.

To load a program, the driver calls ``ship`` of the actors, and then asks them for ``Load``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import export

from mpmd.compat import export_two_bit_integers
from mpmd.ir.plan import Executable, Name, Plan, Spec
from mpmd.program import Function, Variant
from mpmd.runtime.compiling import LoadReply
from mpmd.runtime.requests import Request


@dataclasses.dataclass(frozen=True)
class Shipment:
    """``compiled`` are executables that the actors have compiled already: their functions do not travel."""

    plan: Plan
    exported: Mapping[str, bytes]
    constants: Mapping[Name, np.ndarray]
    compiled: Mapping[str, Variant]


@dataclasses.dataclass(frozen=True)
class Compile(Request[tuple[Spec, ...]]):
    """Asks a group to compile an executable of a program that it is to load, for its output specs."""

    program: int
    executable: Executable
    exported: bytes


@dataclasses.dataclass(frozen=True)
class Load(Request[LoadReply]):
    """Asks a group to compile its part of a shipped program. If that fails, ``Release`` comes next."""

    program: int

    def join(self, answers: Sequence[LoadReply]) -> LoadReply:
        return functools.reduce(operator.or_, answers)


def exported_function(name: str, exported: bytes) -> Function:
    """The function that was exported, under a name that profilers and compiler dumps show."""
    export_two_bit_integers()
    call = export.deserialize(bytearray(exported)).call

    def function(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(call(*arguments))

    function.__name__ = name
    return function
