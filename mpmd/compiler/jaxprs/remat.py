"""Opens rematerialised functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.equations import Atom, as_called, closed, is_dropped, lookup, substitute
from mpmd.compiler.jaxprs.traced import traced_eqns


def inlined_eqns(eqns: Iterable[JaxprEqn], body: Callable[[JaxprEqn], Jaxpr | None]) -> list[JaxprEqn]:
    """Equations with those of the functions they call, recursively, in place of the calls.

    The variables that the calls define keep their names.

    Args:
      body: the jaxpr, without constants, of a call that is to be replaced.
    """
    inlined: list[JaxprEqn] = []
    for eqn in eqns:
        inner = body(eqn)
        if inner is None:
            inlined.append(eqn)
            continue
        inner, _ = canonical(closed(inner))  # where branches have variables of their own
        renamed: dict[Var, Atom] = dict(zip(inner.invars, eqn.invars, strict=True))
        results: dict[Var, Var] = {}
        for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
            if isinstance(atom, Var) and atom not in renamed and not is_dropped(var):
                results.setdefault(atom, var)
        for member in inlined_eqns(inner.eqns, body):
            outvars = [results.get(var) or Var(var.aval) for var in member.outvars]
            inlined.append(as_called(eqn, substitute(member, renamed)).replace(outvars=outvars))
            renamed.update(zip(member.outvars, outvars, strict=True))
        for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
            if not is_dropped(var) and (value := lookup(atom, renamed)) is not var:
                copies, _ = traced_eqns(lambda x: [jnp.copy(x)], [value])
                inlined.append(copies[-1].replace(outvars=[var]))
    return inlined
