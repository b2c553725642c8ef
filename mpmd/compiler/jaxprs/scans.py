"""Tells which operands and results of a scan are constant, carried, or one slice per iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.equations import Atom, aval_of


class ScanOperands(NamedTuple):
    """The positions of a scan's operands: constants, carried values, and scanned arrays.

    The results of a scan are the carried values, then the stacked arrays.
    """

    consts: slice
    carry: slice
    xs: slice

    @property
    def num_carry(self) -> int:
        return self.carry.stop - self.carry.start


def scan_operands(eqn: JaxprEqn) -> ScanOperands:
    """Returns the positions of a scan's operands, by their ranks.

    Only a scanned or stacked array has one axis less in the body. The names of JAX's parameters for the
    positions differ between its versions.
    """
    body: Jaxpr = eqn.params["jaxpr"].jaxpr
    num_carry = sum(map(_same_rank, eqn.outvars, body.outvars))
    num_fixed = sum(map(_same_rank, eqn.invars, body.invars))
    first = num_fixed - num_carry
    return ScanOperands(slice(0, first), slice(first, num_fixed), slice(num_fixed, len(eqn.invars)))


def _same_rank(outside: Atom, inside: Atom) -> bool:
    return len(aval_of(outside).shape) == len(aval_of(inside).shape)


def computed(values: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns the results of the body of a ``lax.scan``, with each result that is an input copied.

    ``lax.scan`` leaves a result that its body returns unchanged out of the equation, which would then have
    fewer results than the body.
    """
    input_ids = set(map(id, inputs))
    return [jnp.copy(value) if id(value) in input_ids else value for value in values]
