"""A program's functions in JAX's export format, for its shipment to the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jax.sharding import AbstractMesh, AxisType

from mpmd.ir.plan import Executable
from mpmd.ir.reshard import GroupShape
from mpmd.program import Function, Program, export_function
from mpmd.util.stopwatch import Stopwatch


class Exports:
    """Exports each function once for each list of input specs and each shape of a submesh."""

    def __init__(self, groups: Sequence[GroupShape], platform: str, watch: Stopwatch):
        self._submeshes = [abstract_submesh(group.axes) for group in groups]
        self._platform = platform
        self._watch = watch
        self._done: dict[tuple, bytes] = {}

    def of(self, mpmd_idx: int, executable: Executable, function: Function) -> bytes:
        submesh = self._submeshes[mpmd_idx]
        key = (id(function), executable.inputs, executable.in_specs, submesh)
        if key not in self._done:
            with self._watch("export"):
                self._done[key] = export_function(function, executable, submesh, self._platform)
        return self._done[key]

    def of_plan(self, program: Program) -> dict[str, bytes]:
        runs_on = {run.executable: group.mpmd_idx for group in program.plan.programs for run in group.runs}
        return {
            name: self.of(mpmd_idx, program.plan.executable(name), program.functions[name])
            for name, mpmd_idx in runs_on.items()
            if name not in program.compiled
        }


def abstract_submesh(
    axes: Mapping[str, int], axis_types: Mapping[str, AxisType] = MappingProxyType({})
) -> AbstractMesh:
    """The shape of a group's submesh, of axes with these names and sizes.

    Axes are ``Auto`` unless ``axis_types`` says otherwise, as the axes of the actors' meshes always are.
    Since JAX 0.11.1 an abstract mesh has to say so.
    """
    types = tuple(axis_types.get(name, AxisType.Auto) for name in axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), types)
