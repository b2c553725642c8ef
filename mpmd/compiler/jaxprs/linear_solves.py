"""Reads ``custom_linear_solve``, as of ``jnp.linalg.solve`` and ``inv``, in a step that is differentiated."""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, aval_of, make_jaxpr


def solution(eqn: JaxprEqn) -> Jaxpr | None:
    """The solution of the equation, as a jaxpr of all its operands; ``None`` for other equations.

    The other functions in its parameters are for derivatives.
    """
    if eqn.primitive.name != "custom_linear_solve":
        return None
    lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    if solve.consts:
        return None
    before = lengths.matvec + lengths.vecmat
    behind = before + lengths.solve + lengths.transpose_solve
    unread: list[Atom] = [*eqn.invars[:before], *eqn.invars[before + lengths.solve : behind]]
    left, right = _new(unread[:before]), _new(unread[before:])
    read = solve.jaxpr.invars
    invars = [*left, *read[: lengths.solve], *right, *read[lengths.solve :]]
    return make_jaxpr(invars, solve.jaxpr.eqns, solve.jaxpr.outvars)


def _new(atoms: list[Atom]) -> list[Var]:
    return [Var(aval_of(atom)) for atom in atoms]
