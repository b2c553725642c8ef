"""Replaces the meshes that equations name or were traced under, and the shardings over these meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from mpmd.compiler.jaxprs.equations import are_same, with_params
from mpmd.ir.specs import axes_of

Change = Callable[[JaxprEqn, Any], Any]
"""From an equation and a mesh or sharding among its parameters to what takes its place."""

Replace = Callable[[JaxprEqn], JaxprEqn]
"""Returns the equation that replaces an equation."""


def _same(eqn: JaxprEqn) -> JaxprEqn:
    return eqn


def jaxpr_with_meshes(jaxpr: Jaxpr, change: Change, replace: Replace = _same) -> Jaxpr:
    """The jaxpr with ``change`` of every mesh and sharding of its equations, inner ones too."""
    eqns = [eqn_with_meshes(eqn, change, replace) for eqn in jaxpr.eqns]
    return jaxpr if are_same(eqns, jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def eqn_with_meshes(eqn: JaxprEqn, change: Change, replace: Replace = _same) -> JaxprEqn:
    """Applies ``change`` to every mesh and sharding of the equation and of the equations in its bodies.

    Each equation first goes through ``replace``. Without a change, the result is the same object.
    """
    eqn = replace(eqn)

    def changed(value: Any) -> Any:
        if isinstance(value, Jaxpr):
            return jaxpr_with_meshes(value, change, replace)
        return change(eqn, value)

    return with_params(eqn, (Jaxpr, Mesh, AbstractMesh, NamedSharding), changed)


def axes_named(sharding: NamedSharding) -> set[str]:
    return axes_of(tuple(entry for entry in sharding.spec if isinstance(entry, str | tuple)))
