"""Opens rematerialised functions: their equations take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.equations import Atom, closed, is_dropped, is_remat, with_eqns
from mpmd.compiler.jaxprs.inline import Inliner
from mpmd.compiler.jaxprs.kernels import kernel_of
from mpmd.compiler.jaxprs.traced import named


def _is_no_kernel(eqn: JaxprEqn) -> bool:
    return kernel_of(eqn) is None


def without_remat(
    eqns: Iterable[JaxprEqn], should_open: Callable[[JaxprEqn], bool] = _is_no_kernel
) -> list[JaxprEqn]:
    """Inlines rematerialised functions into equations, recursively.

    Results keep their variables.

    Args:
      should_open: whether to inline the function of a ``remat`` equation; by default each that is no kernel.
    """

    def callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
        if not is_remat(eqn) or not should_open(eqn):
            return None
        body, _ = canonical(closed(eqn.params["jaxpr"]))  # where branches have variables of their own
        return closed(body)

    opening = Inliner(callee)
    renamed: dict[Var, Atom] = {}
    opening.add(eqns, renamed)
    results = [var for var in renamed if not is_dropped(var)]
    return named(opening.eqns, [renamed[var] for var in results], results) if renamed else opening.eqns


def with_remat_open(jaxpr: Jaxpr, should_open: Callable[[JaxprEqn], bool]) -> Jaxpr:
    return with_eqns(jaxpr, without_remat(jaxpr.eqns, should_open))
