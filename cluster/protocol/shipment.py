"""Programs as they travel to the actors: the resolved plan, and functions in JAX's export format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import export

from mpmd.ir.plan import Executable, Name, Plan
from mpmd.program import Function, Program, Variant, export_function
from mpmd.util.stopwatch import Stopwatch


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A program as it travels to the actors: the resolved plan, and the functions as exported bytes.

    ``compiled`` are the executables that the actors have compiled already, and whose functions do not travel.
    """

    plan: Plan
    exported: Mapping[str, bytes]
    constants: Mapping[Name, np.ndarray]
    compiled: Mapping[str, Variant]


class Exports:
    """Exports each function once for each list of input specs and each shape of a submesh."""

    def __init__(self, submeshes: Sequence[jax.sharding.AbstractMesh], platform: str, watch: Stopwatch):
        self._submeshes = submeshes
        self._platform = platform
        self._watch = watch
        self._done: dict[tuple, bytes] = {}

    def of(self, mpmd_idx: int, executable: Executable, function: Function) -> bytes:
        """An executable's function for a group; groups of equal submeshes share it."""
        submesh = self._submeshes[mpmd_idx]
        key = (id(function), executable.inputs, executable.in_specs, submesh)
        if key not in self._done:
            with self._watch("export"):
                self._done[key] = export_function(function, executable, submesh, self._platform)
        return self._done[key]

    def of_plan(self, program: Program) -> dict[str, bytes]:
        """The function of each executable that the groups have not compiled yet."""
        runs_on = {run.executable: group.mpmd_idx for group in program.plan.programs for run in group.runs}
        return {
            name: self.of(mpmd_idx, program.plan.executable(name), program.functions[name])
            for name, mpmd_idx in runs_on.items()
            if name not in program.compiled
        }


def exported_function(name: str, exported: bytes) -> Function:
    """The function that was exported, under a name that profilers and compiler dumps show."""
    call = export.deserialize(bytearray(exported)).call

    def function(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(call(*arguments))

    function.__name__ = name
    return function
