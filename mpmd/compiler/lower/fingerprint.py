"""Tells whether two jaxprs compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, NamedSharding

from mpmd.compat import with_constants_as_inputs
from mpmd.compiler.jaxprs.equations import Atom, aval_of


def fingerprint(jaxpr: Jaxpr) -> Any:
    """A hashable value, equal for jaxprs that differ in the names of variables only.

    Parameters that are not comparable by value, such as callbacks, are compared by identity.
    """
    numbers: dict[Var, int] = {var: i for i, var in enumerate(jaxpr.invars)}

    def atom_key(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return ("literal", _type(atom), np.asarray(atom.val).tobytes())
        return numbers[atom]

    def eqn_key(eqn: JaxprEqn) -> Any:
        inputs = tuple(map(atom_key, eqn.invars))
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        params = tuple(
            (name, _param_key(value))
            for name, value in sorted(eqn.params.items())
            if name not in _PARAMS_FOR_DIFFERENTIATION and not _says_nothing(name, value)
        )
        return (eqn.primitive, inputs, params, tuple(map(_type, eqn.outvars)))

    types, eqns = tuple(map(_type, jaxpr.invars)), tuple(map(eqn_key, jaxpr.eqns))
    return types, eqns, tuple(map(atom_key, jaxpr.outvars))


def _type(atom: Atom) -> Any:
    """Returns the type of a value, without its mesh if the axes are ``Auto`` and the type has no sharding.

    JAX traces arguments without a mesh, and values that it computes from them with the group's mesh.
    """
    aval = aval_of(atom)
    if isinstance(aval, ShapedArray) and _is_auto(aval.sharding):
        return aval.shape, aval.dtype, aval.weak_type
    return aval


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a parameter is the type of a result, which does not say how it is sharded."""
    return name == "out_sharding" and (value is None or _is_auto(value))


def _is_auto(sharding: NamedSharding) -> bool:
    return {AxisType.Auto}.issuperset(sharding.mesh.axis_types)


# Of custom_jvp and custom_vjp: a differentiated function needs them no more, and every trace makes new ones.
_PARAMS_FOR_DIFFERENTIATION = frozenset(
    {"jvp_jaxpr_fun", "jvp", "fwd_jaxpr_thunk", "fwd", "bwd", "out_trees"}
)


def _param_key(value: Any) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        return fingerprint(with_constants_as_inputs(value)), tuple(map(id, value.consts))
    if isinstance(value, Jaxpr):
        return fingerprint(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_param_key, value))
    try:
        hash(value)
    except TypeError:
        return ("identity", id(value))
    return value
