"""Replaces the meshes that equations name or were traced under, and the shardings over these meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding

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
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def eqn_with_meshes(eqn: JaxprEqn, change: Change, replace: Replace = _same) -> JaxprEqn:
    """Applies ``change`` to every mesh and sharding of the equation and of the equations in its bodies.

    Each equation first goes through ``replace``. Without a change, the result is the same object.
    """
    eqn = replace(eqn)

    def changed(value: Any) -> Any:
        match value:
            case Jaxpr():
                return jaxpr_with_meshes(value, change, replace)
            case ClosedJaxpr():
                inner = jaxpr_with_meshes(value.jaxpr, change, replace)
                return value if inner is value.jaxpr else value.replace(jaxpr=inner)
            case tuple() | list() if type(value) in (tuple, list):
                parts = [changed(part) for part in value]
                same = all(new is old for new, old in zip(parts, value, strict=True))
                return value if same else type(value)(parts)
            case Mesh() | AbstractMesh() | NamedSharding():
                return change(eqn, value)
        return value

    params = {name: changed(value) for name, value in eqn.params.items()}
    return eqn if all(params[name] is eqn.params[name] for name in params) else eqn.replace(params=params)


def axes_named(sharding: NamedSharding) -> set[str]:
    return axes_of(tuple(entry for entry in sharding.spec if isinstance(entry, str | tuple)))
