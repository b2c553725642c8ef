"""Moves equations to the submesh of the group that runs them, where groups have different ones.

A step is traced once, within the first group's submesh. Its equations do not depend on how many devices are
along an axis, but for equations with a mesh in their parameters. A sharding over the group's axes means the
same on any submesh with these axes. The function of a ``shard_map`` does not: it was traced for its part of
every array. A function under ``mpmd.per_group`` is traced here, for each group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, NamedSharding

from mpmd.compiler.jaxprs.equations import avals_of, contains, with_eqns, with_params
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.lower.call import call_p
from mpmd.errors import CompileError
from mpmd.language.callbacks import callback_of
from mpmd.language.per_group import per_group_p, traced_for_group
from mpmd.sharding import axes_named, within


class GroupMeshes:
    """The submeshes of the groups. ``faults`` collects why equations cannot run where they are to."""

    def __init__(self, submeshes: Sequence[AbstractMesh]):
        self.submeshes = tuple(submeshes)
        self._are_equal = len(set(self.submeshes)) == 1
        self._faults: dict[str, None] = {}

    @property
    def faults(self) -> list[str]:
        return list(self._faults)

    def on_group(self, jaxpr: Jaxpr, mpmd_idx: int) -> Jaxpr:
        """Returns a task as its group runs it: on the group's submesh, without the driver's callbacks.

        Args:
          jaxpr: the task's jaxpr in ``Program.jaxprs``.

        Raises: ``CompileError`` for a function under ``per_group`` whose results have other shapes here.
        """
        eqns = [eqn for eqn in jaxpr.eqns if callback_of(eqn) is None]
        if not self._are_equal or contains(jaxpr, per_group_p):
            eqns = [self._moved(eqn, mpmd_idx) for eqn in eqns]
        return with_eqns(jaxpr, eqns)

    def _moved(self, eqn: JaxprEqn, mpmd_idx: int) -> JaxprEqn:
        if eqn.primitive is per_group_p:
            eqn = self._traced(eqn, mpmd_idx)

        def changed(value: Any) -> Any:
            if isinstance(value, Jaxpr):
                return value.replace(eqns=[self._moved(inner, mpmd_idx) for inner in value.eqns])
            return self._over_submesh(eqn, value, mpmd_idx)

        return with_params(eqn, (Jaxpr, AbstractMesh, NamedSharding), changed)

    def _over_submesh(self, eqn: JaxprEqn, value: Any, mpmd_idx: int) -> Any:
        submesh = self.submeshes[mpmd_idx]
        mesh = value.mesh if isinstance(value, NamedSharding) else value
        if not isinstance(mesh, AbstractMesh) or mesh.shape == submesh.shape or mesh.empty:
            return value
        of_groups = mesh.axis_names == submesh.axis_names
        if not of_groups and mesh.size == submesh.size:
            return value  # the group's devices, in their order
        if isinstance(value, AbstractMesh):
            if of_groups and eqn.primitive.name != "shard_map":
                return submesh
        elif axes_named(value) <= set(submesh.axis_names):
            return NamedSharding(submesh, value.spec)
        self._faults[_fault(eqn, mesh, mpmd_idx, submesh)] = None
        return value

    def _traced(self, eqn: JaxprEqn, mpmd_idx: int) -> JaxprEqn:
        submesh = self.submeshes[mpmd_idx]
        with within(submesh):
            jaxpr = traced_for_group(eqn.params["fun"], avals_of(eqn.invars))
        shapes, on_first_group = _shapes(jaxpr.out_avals), _shapes(avals_of(eqn.outvars))
        if shapes != on_first_group:
            raise CompileError(
                f"a function under per_group at {where(eqn)} returns {shapes} on group {mpmd_idx}, whose "
                f"submesh is {dict(submesh.shape)}, but {on_first_group} on group 0"
            )
        return eqn.replace(primitive=call_p, params={"call_jaxpr": jaxpr, "name": "per_group"})


def _shapes(avals: Iterable[Any]) -> str:
    return ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in avals)


def _fault(eqn: JaxprEqn, mesh: AbstractMesh, mpmd_idx: int, submesh: AbstractMesh) -> str:
    return (
        f"{eqn.primitive} at {where(eqn)} was traced for a mesh of {dict(mesh.shape)}, but runs on group "
        f"{mpmd_idx}, whose submesh is {dict(submesh.shape)}: call it in a function under mpmd.per_group, "
        "which is traced for each group"
    )
