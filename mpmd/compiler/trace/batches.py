"""Finds the arguments that nothing reads but loops, which take one microbatch of them at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import operands, size, variables
from mpmd.language.reduce import treduce_p

_REARRANGED = frozenset(
    "broadcast_in_dim convert_element_type copy reshape sharding_constraint slice squeeze transpose".split()
)
_TAKEN = frozenset({"dynamic_slice", "gather"})


def find_batches(step: Jaxpr, eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The arguments of a step of which all that it reads are the microbatches.

    Args:
      eqns: those of the step's equations that its results need.
    """
    read_otherwise = set(variables(step.outvars))
    taken: set[Var] = set()
    for eqn in reversed(eqns):
        taken_here: set[Var] = set()
        if eqn.primitive is treduce_p:
            taken_here = _taken_by(eqn)
        elif eqn.primitive.name in _REARRANGED and taken.difference(read_otherwise).issuperset(eqn.outvars):
            taken_here = set(operands(eqn))
        taken |= taken_here
        read_otherwise.update(var for var in operands(eqn) if var not in taken_here)
    return taken.difference(read_otherwise).intersection(step.invars)


def _taken_by(loop: JaxprEqn) -> set[Var]:
    """The values that a loop reads at the microbatch index alone."""
    body: Jaxpr = loop.params["body"]
    closed_over = len(loop.invars) - len(loop.outvars)
    whole = _read_whole(body, [body.invars[closed_over]])
    read = {var for eqn in body.eqns for var in operands(eqn)} - whole
    pairs = zip(body.invars[:closed_over], loop.invars, strict=False)
    taken = set(variables(atom for var, atom in pairs if var in read))
    return taken.difference(variables(loop.invars[closed_over:]))


def _read_whole(jaxpr: Jaxpr, indices: Collection[Var]) -> set[Var]:
    """The values that equations read other than at one of the indices."""
    counted = set(indices)
    whole = set(variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _TAKEN and not counted.isdisjoint(operands(eqn)[1:]):
            whole.update(operands(eqn)[1:])
        else:
            whole.update(operands(eqn))
        if not counted.isdisjoint(operands(eqn)) and all(size(var) == 1 for var in eqn.outvars):
            counted.update(eqn.outvars)
    return whole
