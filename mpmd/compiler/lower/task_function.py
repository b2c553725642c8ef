"""Builds the function of one task by itself from the equations of its program."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.equations import make_jaxpr
from mpmd.compiler.lower.executables import function_of
from mpmd.compiler.lower.group_meshes import GroupMeshes
from mpmd.language.callbacks import callback_of
from mpmd.program import Function


def on_group(jaxpr: Jaxpr, submeshes: Sequence[AbstractMesh], mpmd_idx: int) -> Jaxpr:
    """Returns the equations of a task as its group runs them: on its submesh, without the driver's callbacks.

    Args:
      jaxpr: the task's jaxpr in ``Program.jaxprs``.
      submeshes: the submeshes of all groups.
    """
    eqns = [eqn for eqn in jaxpr.eqns if callback_of(eqn) is None]
    return make_jaxpr(jaxpr.invars, GroupMeshes(submeshes).moved(eqns, mpmd_idx), jaxpr.outvars)


def task_function(jaxpr: Jaxpr, name: str) -> Function:
    """The function of the executable that has these equations, on any submesh of their group's shape."""
    return function_of(name, jaxpr.invars, jaxpr.eqns, jaxpr.outvars)
