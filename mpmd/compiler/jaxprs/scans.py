"""Tells which operands and results of a scan are constant, carried, or one slice per iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.interpreters import partial_eval

from mpmd.compiler.jaxprs.equations import Atom, aval_of, closed, operands


class ScanOperands(NamedTuple):
    """The positions of a scan's operands: constants, what is carried, and what is scanned over.

    The results of a scan are what is carried, then what is stacked.
    """

    consts: slice
    carry: slice
    xs: slice

    @property
    def num_carry(self) -> int:
        return self.carry.stop - self.carry.start


def scan_operands(eqn: JaxprEqn) -> ScanOperands:
    """The operands of a scan.

    They are told by their ranks: only what is scanned over or stacked has one axis less in the body. The
    parameters for this differ between JAX versions.
    """
    body: Jaxpr = eqn.params["jaxpr"].jaxpr
    num_carry = sum(map(_same_rank, eqn.outvars, body.outvars))
    num_fixed = sum(map(_same_rank, eqn.invars, body.invars))
    first = num_fixed - num_carry
    return ScanOperands(slice(0, first), slice(first, num_fixed), slice(num_fixed, len(eqn.invars)))


def _same_rank(outside: Atom, inside: Atom) -> bool:
    return len(aval_of(outside).shape) == len(aval_of(inside).shape)


def computed(values: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The results of the body of a ``lax.scan``, with copies of those that are its inputs.

    ``lax.scan`` leaves out of its equation what the body returns as it is: then the equation would have fewer
    results than the body.
    """
    input_ids = set(map(id, inputs))
    return [jnp.copy(value) if id(value) in input_ids else value for value in values]


def without_copies(eqn: JaxprEqn) -> JaxprEqn:
    """A scan that was made of a body with ``computed`` results, which now returns its inputs as they are."""
    body: Jaxpr = eqn.params["jaxpr"].jaxpr
    inputs = set(body.invars)
    copied = {
        inner.outvars[0]: inner.invars[0]
        for inner in body.eqns
        if inner.primitive.name in ("copy", "copy_p") and inputs.issuperset(operands(inner))
    }
    outvars = [copied.get(atom, atom) if isinstance(atom, Var) else atom for atom in body.outvars]
    smaller, used = partial_eval.dce_jaxpr(body.replace(outvars=outvars), [True] * len(outvars), True)
    assert all(used), "all inputs are kept"
    return eqn.replace(params={**eqn.params, "jaxpr": closed(smaller)})
