"""A step that is planned and proven, and that no group has compiled."""

from __future__ import annotations

from mpmd.arguments.call import Call
from mpmd.arguments.signature import CallSignature
from mpmd.compiler.pipeline import CompiledStep
from mpmd.explanation import Report, report
from mpmd.ir.plan import Plan
from mpmd.ir.routes import Topology
from mpmd.meshes.group_mesh import GroupMesh, mesh_fault
from mpmd.runtime.step_meter import StepMeter
from mpmd.step.loaded_step import LoadedStep
from mpmd.step.planned_step import PlannedStep, explain
from mpmd.validation import raise_faults


class LoweredStep(PlannedStep):
    """The result of ``step.lower(...)``: the plan for arguments of certain shapes, made without devices.

    Shardings that the groups' compilers will choose are open: their values count as replicated, the most that
    they can be. XLA's temporary buffers are not known yet.
    """

    def __init__(
        self, compiled: CompiledStep, call: Call, mesh: GroupMesh, signature: CallSignature, name: str
    ):
        self._name = name  # of the function
        self._compiled = compiled
        self._call = call
        self._mesh = mesh
        self._signature = signature

    @property
    def compiled(self) -> CompiledStep:
        return self._compiled

    @property
    def plan(self) -> Plan:
        return self._compiled.program.plan

    @property
    def topology(self) -> Topology:
        return self._mesh.topology

    def report(self) -> Report:
        """The tasks of each group, and its needs that are known before the groups compile; printable."""
        return report(
            plan=self.plan,
            topology=self.topology,
            verified=self._compiled.verified,
            updated={argument for argument, _ in self._compiled.step.fed_back},
            seconds=self._compiled.seconds,
            findings=explain(self).findings,
        )

    def compile(self, mpmd_mesh: GroupMesh | None = None) -> LoadedStep:
        """Compiles and loads the step on the groups.

        Args:
          mpmd_mesh: groups of the shape that the step was planned for; by default those it was planned for.

        Raises: ``ValueError`` for groups of another shape; ``RuntimeError`` for a mesh without devices, and
          for one that was closed.
        """
        raise_faults(mesh_fault("mpmd_mesh", mpmd_mesh, optional=True))
        mesh = self._mesh if mpmd_mesh is None else mpmd_mesh
        if (planned := _axes(self._mesh)) != (actual := _axes(mesh)):
            raise ValueError(
                f"the step was planned for groups with the submeshes {planned}, and these have {actual}: "
                "lower it for a mesh of that shape"
            )
        meter = StepMeter(self._name, mesh)
        return LoadedStep(self._compiled, self._call, mesh, self._signature, meter)


def _axes(mesh: GroupMesh) -> list[str]:
    """The axes of each group's submesh, with their sizes and types."""
    return [
        ", ".join(
            f"{axis}={size} ({kind})"
            for (axis, size), kind in zip(m.shape.items(), m.axis_types, strict=True)
        )
        for m in mesh.abstract_submeshes
    ]
