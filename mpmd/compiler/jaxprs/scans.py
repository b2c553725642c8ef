"""Which operands and results of a scan are constant, carried, or one slice per iteration."""

from __future__ import annotations

from typing import NamedTuple

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
