"""Tells which operands and results of a scan are constant, carried, or one slice per iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.equations import Atom, aval_of


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
