"""A program's functions in JAX's export format, for its shipment to the groups."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from mpmd.ir.plan import Executable
from mpmd.program import Function, Program, export_function
from mpmd.util.stopwatch import Stopwatch


class Exports:
    """Exports each function once for each list of input specs and each shape of a submesh."""

    def __init__(self, submeshes: Sequence[jax.sharding.AbstractMesh], platform: str, watch: Stopwatch):
        self._submeshes = submeshes
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
