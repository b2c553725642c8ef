"""Opens rematerialised functions: their equations take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.equations import Atom, as_called, closed, is_dropped, is_remat, lookup, substitute
from mpmd.compiler.jaxprs.traced import traced_eqns


def without_remat(
    eqns: Iterable[JaxprEqn], should_open: Callable[[JaxprEqn], bool] = is_remat
) -> list[JaxprEqn]:
    """Inlines rematerialised functions into equations, recursively.

    The variables that the functions define keep their names.

    Args:
      should_open: whether to inline the function of a ``remat`` equation; by default every one.
    """
    opened: list[JaxprEqn] = []
    for eqn in eqns:
        if not is_remat(eqn) or not should_open(eqn):
            opened.append(eqn)
            continue
        body, _ = canonical(closed(eqn.params["jaxpr"]))  # where branches have variables of their own
        renamed: dict[Var, Atom] = dict(zip(body.invars, eqn.invars, strict=True))
        results: dict[Var, Var] = {}
        for var, atom in zip(eqn.outvars, body.outvars, strict=True):
            if isinstance(atom, Var) and atom not in renamed and not is_dropped(var):
                results.setdefault(atom, var)
        for member in without_remat(body.eqns, should_open):
            outvars = [results.get(var) or Var(var.aval) for var in member.outvars]
            opened.append(as_called(eqn, substitute(member, renamed)).replace(outvars=outvars))
            renamed.update(zip(member.outvars, outvars, strict=True))
        for var, atom in zip(eqn.outvars, body.outvars, strict=True):
            if not is_dropped(var) and (value := lookup(atom, renamed)) is not var:
                copies, _ = traced_eqns(lambda x: [jnp.copy(x)], [value])
                opened.append(copies[-1].replace(outvars=[var]))
    return opened
