"""The equations that a pass writes by having JAX trace a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.equations import Atom, aval_of, lookup, makers_of, substitute


def traced_eqns(fun: Callable, inputs: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of ``fun(*inputs)``, in canonical form, and its results: variables or literals.

    A function that is under ``jax.jit`` is traced once for inputs of the same shapes and dtypes.
    """
    avals = [jax.ShapeDtypeStruct(aval_of(a).shape, aval_of(a).dtype) for a in inputs]
    traced = fun if isinstance(fun, jax.stages.Wrapped) else jax.jit(fun)
    jaxpr, constants = canonical(traced.trace(*avals).jaxpr)
    assert not constants and len(jaxpr.invars) == len(inputs), "the function closes over arrays"
    renamed: dict[Var, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [Var(var.aval) for var in eqn.outvars]
        eqns.append(substitute(eqn, renamed).replace(outvars=outvars))
        renamed.update(zip(eqn.outvars, outvars, strict=True))
    return eqns, [lookup(atom, renamed) for atom in jaxpr.outvars]


_copied = jax.jit(lambda x: [jnp.copy(x)])


def copy_of(value: Atom) -> JaxprEqn:
    (copy,), _ = traced_eqns(_copied, [value])
    return copy


def named(eqns: Sequence[JaxprEqn], values: Sequence[Atom], names: Sequence[Var]) -> list[JaxprEqn]:
    """Renames the results ``values`` of equations to ``names``, in the same order.

    A value that no equation computes, such as an operand that is returned, or that occurs twice, is copied.
    """
    computed = makers_of(eqns)
    renamed: dict[Var, Var] = {}
    copied: list[tuple[Var, Atom]] = []
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Var) and value in computed and value not in renamed:
            renamed[value] = name
        else:
            copied.append((name, value))
    renamed_eqns = [
        substitute(eqn, renamed).replace(outvars=[renamed.get(var, var) for var in eqn.outvars])
        for eqn in eqns
    ]
    copies = (copy_of(lookup(value, renamed)).replace(outvars=[name]) for name, value in copied)
    return [*renamed_eqns, *copies]
