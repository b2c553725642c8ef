"""Dead code: leaves out the equations that no result needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.control_flow import live_body
from mpmd.compiler.jaxprs.equations import Atom, free_variables, is_among, is_dropped, make_jaxpr, with_eqns


def live_eqns(eqns: Sequence[JaxprEqn], results: Iterable[Atom]) -> tuple[JaxprEqn, ...]:
    """Returns the equations, or parts of equations, that ``results`` need, and equations with effects."""
    computed = {var for eqn in eqns for var in eqn.outvars}
    outvars = [atom for atom in results if is_among(atom, computed)]
    whole = make_jaxpr(free_variables(eqns), eqns, outvars)
    return tuple(live_body(whole, range(len(outvars)))[0].eqns)


def live_jaxpr(jaxpr: Jaxpr, is_kept: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """Returns the jaxpr with the equations that its results or equations with ``is_kept`` need."""
    kept = [var for eqn in jaxpr.eqns if is_kept(eqn) for var in eqn.outvars if not is_dropped(var)]
    return with_eqns(jaxpr, live_eqns(jaxpr.eqns, [*jaxpr.outvars, *kept]))
