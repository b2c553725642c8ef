"""Takes a ``lax.cond`` apart by its results."""

from __future__ import annotations

from collections.abc import Collection

from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import partial_eval


def can_be_split(eqn: JaxprEqn) -> bool:
    """Whether the equation is a ``lax.cond`` or ``lax.switch`` of several results that only computes."""
    return (
        eqn.primitive.name == "cond"
        and len(eqn.outvars) > 1
        and not eqn.effects
        and not any(branch.consts for branch in eqn.params["branches"])
    )


def with_results(eqn: JaxprEqn, kept: Collection[int]) -> JaxprEqn:
    """The conditional with the results at the positions ``kept`` alone, and what they need."""
    branches = eqn.params["branches"]
    wanted = [i in kept for i in range(len(eqn.outvars))]
    used = [partial_eval.dce_jaxpr(branch.jaxpr, wanted)[1] for branch in branches]
    needed = [any(flags) for flags in zip(*used, strict=True)]
    smaller = tuple(
        ClosedJaxpr(partial_eval.dce_jaxpr(branch.jaxpr, wanted, needed)[0], ()) for branch in branches
    )
    predicate, *operands = eqn.invars
    return eqn.replace(
        invars=[predicate, *(atom for atom, is_needed in zip(operands, needed, strict=True) if is_needed)],
        outvars=[var for i, var in enumerate(eqn.outvars) if i in kept],
        params={**eqn.params, "branches": smaller},
    )
