"""Takes a ``lax.cond`` apart by its results, or by its branches."""

from __future__ import annotations

from collections.abc import Collection

from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.interpreters import partial_eval

from mpmd.compiler.jaxprs.equations import Atom, closed, lookup, substitute
from mpmd.compiler.jaxprs.traced import traced_eqns


def only_computes(eqn: JaxprEqn) -> bool:
    """Whether the equation is a ``lax.cond`` or ``lax.switch`` without effects."""
    return eqn.primitive.name == "cond" and not eqn.effects


def can_be_split(eqn: JaxprEqn) -> bool:
    """Whether the equation is a ``lax.cond`` or ``lax.switch`` of several results that only computes."""
    return len(eqn.outvars) > 1 and only_computes(eqn)


def with_results(eqn: JaxprEqn, kept: Collection[int]) -> JaxprEqn:
    """The conditional with the results at the positions ``kept`` alone, and what they need."""
    branches = eqn.params["branches"]
    is_kept = [i in kept for i in range(len(eqn.outvars))]
    used = [partial_eval.dce_jaxpr(branch.jaxpr, is_kept)[1] for branch in branches]
    needed = [any(flags) for flags in zip(*used, strict=True)]
    smaller = tuple(closed(partial_eval.dce_jaxpr(branch.jaxpr, is_kept, needed)[0]) for branch in branches)
    predicate, *operands = eqn.invars
    return eqn.replace(
        invars=[predicate, *(atom for atom, is_needed in zip(operands, needed, strict=True) if is_needed)],
        outvars=[var for i, var in enumerate(eqn.outvars) if i in kept],
        params={**eqn.params, "branches": smaller},
    )


def as_selections(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations of all branches, and for each result one that selects it from the branches' results.

    So each equation can run where its own operands are. All branches are computed, whichever is taken.
    """
    index, *operands = eqn.invars
    eqns: list[JaxprEqn] = []
    results: list[list[Atom]] = []
    for branch in eqn.params["branches"]:
        renamed: dict[Var, Atom] = dict(zip(branch.jaxpr.invars, operands, strict=True))
        for member in branch.jaxpr.eqns:
            outvars = [Var(var.aval) for var in member.outvars]
            eqns.append(substitute(member, renamed).replace(outvars=outvars))
            renamed.update(zip(member.outvars, outvars, strict=True))
        results.append([lookup(atom, renamed) for atom in branch.jaxpr.outvars])
    for var, *cases in zip(eqn.outvars, *results, strict=True):
        (selection,), _ = traced_eqns(lambda i, *cases: [lax.select_n(i, *cases)], [index, *cases])
        eqns.append(selection.replace(outvars=[var], source_info=eqn.source_info))
    return eqns
