"""A function as one sequence of equations, without the calls that would hide its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from mpmd.compiler.jaxprs.canonical import called
from mpmd.compiler.jaxprs.control_flow import live_eqns
from mpmd.compiler.jaxprs.equations import Atom, is_remat, lookup, with_eqns
from mpmd.compiler.jaxprs.inline import Inliner
from mpmd.language.remat import Remat

Function = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class RematOptions:
    policy: Any
    prevent_cse: Any = True

    @classmethod
    def by_policy(cls, policy: Remat) -> RematOptions | None:
        return None if policy is Remat.NONE else cls(getattr(jax.checkpoint_policies, policy.value))


def under_remat(function: ClosedJaxpr, options: RematOptions | None) -> Function:
    run = jaxpr_as_fun(function)
    if options is None:
        return run
    return jax.checkpoint(run, policy=options.policy, prevent_cse=options.prevent_cse)


_JITS = frozenset({"jit", "closed_call", "eval_jaxpr"})


@dataclasses.dataclass(frozen=True)
class OpenFunction:
    """A function's equations.

    Attributes:
      jaxpr: the equations, with the inputs of the function. Each variable is defined once.
      constants: the other values that the equations read.
      remat: for each equation, the opened function under ``jax.checkpoint`` that it belongs to, if any.
    """

    jaxpr: Jaxpr
    constants: Mapping[Var, Any]
    remat: tuple[RematOptions | None, ...]


def open_function(function: ClosedJaxpr, should_open: Callable[[JaxprEqn], bool]) -> OpenFunction:
    """Opens ``jit`` and rematerialised functions where ``should_open`` says so, recursively.

    Functions with derivatives of their own stay calls. Equations that no result needs are left out.
    """
    jaxpr = function.jaxpr

    def callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
        is_call = eqn.primitive.name in _JITS
        if not (is_call or is_remat(eqn)) or not should_open(eqn):
            return None
        return called(eqn) if is_call else ClosedJaxpr(eqn.params["jaxpr"], ())

    opening = _LayerOpening(callee)
    renamed = opening.constants_of(function)
    opening.add(live_eqns(jaxpr.eqns, jaxpr.outvars), renamed)
    outvars = [lookup(atom, renamed) for atom in jaxpr.outvars]
    jaxpr = with_eqns(jaxpr, opening.eqns, constvars=[], outvars=outvars)
    return OpenFunction(jaxpr, opening.constants, tuple(opening.remat))


class _LayerOpening(Inliner):
    def __init__(self, callee: Callable[[JaxprEqn], ClosedJaxpr | None]):
        super().__init__(callee)
        self._around: RematOptions | None = None
        self.remat: list[RematOptions | None] = []

    def open(self, call: JaxprEqn, callee: ClosedJaxpr, operands: Iterable[Atom]) -> list[Atom]:
        around = self._around
        if is_remat(call):
            self._around = RematOptions(call.params["policy"], call.params["prevent_cse"])
        results = super().open(call, callee, operands)
        self._around = around
        return results

    def append(self, eqn: JaxprEqn) -> None:
        super().append(eqn)
        self.remat.append(self._around)
