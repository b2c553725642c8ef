"""A step that is planned and proven, and that no group has compiled."""

from __future__ import annotations

from typing import Any

import jax

from mpmd.arguments.call import Call
from mpmd.arguments.signature import CallSignature
from mpmd.compat import api_boundary, forget_lowered
from mpmd.compiler.pipeline import CompiledStep
from mpmd.explanation import Report
from mpmd.ir.plan import Plan
from mpmd.meshes.group_mesh import GroupMesh, mesh_fault
from mpmd.program import arguments, jitted
from mpmd.runtime.collectives import ExecutableAnalysis
from mpmd.runtime.step_meter import StepMeter
from mpmd.step.loaded_step import LoadedStep
from mpmd.step.planned_step import PlannedStep
from mpmd.validation import raise_faults


class LoweredStep(PlannedStep):
    """The result of ``step.lower(...)``: the plan for arguments of certain shapes, made without devices.

    Shardings that the groups' compilers will choose are open: their values count as replicated, the most that
    they can be. XLA's temporary buffers are not known yet.
    """

    def __init__(
        self, compiled: CompiledStep, call: Call, mesh: GroupMesh, signature: CallSignature, name: str
    ):
        super().__init__(compiled, call, mesh, signature)
        self._name = name  # of the function

    @property
    def plan(self) -> Plan:
        return self.compiled.program.plan

    def _analyses(self, *text_arguments: Any, **text_options: Any) -> dict[str, ExecutableAnalysis]:
        platform = getattr(self.mesh.whole, "platform", jax.default_backend())
        groups = {run.executable: group.mpmd_idx for group in self.plan.programs for run in group.runs}
        analyses = {}
        for one in self.plan.executables:
            submesh = self.submeshes[groups[one.name]]
            traced = jitted(self.compiled.program.functions[one.name], one, submesh).trace(*arguments(one))
            lowered = traced.lower(lowering_platforms=(platform,))
            text = lowered.as_text(*text_arguments, **text_options)
            analyses[one.name] = ExecutableAnalysis(text, lowered.cost_analysis() or {})
        forget_lowered()
        return analyses

    def report(self) -> Report:
        """The tasks of each group, and its needs that are known before the groups compile; printable."""
        return self._report(verified=self.compiled.verified, seconds=self.compiled.seconds)

    @api_boundary
    def compile(self, mpmd_mesh: GroupMesh | None = None) -> LoadedStep:
        """Compiles and loads the step on the groups.

        Args:
          mpmd_mesh: groups of the shape that the step was planned for; by default those it was planned for.

        Raises: ``ValueError`` for groups of another shape; ``RuntimeError`` for a mesh without devices, and
          for one that was closed.
        """
        raise_faults(mesh_fault("mpmd_mesh", mpmd_mesh, optional=True))
        mesh = self.mesh if mpmd_mesh is None else mpmd_mesh
        if (planned := _axes(self.mesh)) != (actual := _axes(mesh)):
            raise ValueError(
                f"the step was planned for groups with the submeshes {planned}, and these have {actual}: "
                "lower it for a mesh of that shape"
            )
        meter = StepMeter(self._name, mesh)
        return LoadedStep(self.compiled, self._call, mesh, self.signature, meter)


def _axes(mesh: GroupMesh) -> list[str]:
    return [
        ", ".join(
            f"{axis}={size} ({kind})"
            for (axis, size), kind in zip(m.shape.items(), m.axis_types, strict=True)
        )
        for m in mesh.abstract_submeshes
    ]
