"""Replaces calls by the equations of the functions that they call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, as_called, lookup, substitute

Constants = dict[Var, Any]
"""The values of variables that a jaxpr reads besides its arguments."""


class Inliner:
    """Equations in which some calls are replaced by the functions' equations.

    Attributes:
      eqns: the equations, in their order.
      constants: the values that the inlined functions close over.
    """

    def __init__(self, callee: Callable[[JaxprEqn], ClosedJaxpr | None], own_variables: bool = False):
        """
        Args:
          callee: the function that an equation calls, if its equations are to take the place of the call.
          own_variables: whether all equations define new variables; otherwise only equations of inlined
            functions do, since a function may be called several times.
        """
        self.eqns: list[JaxprEqn] = []
        self.constants: Constants = {}
        self._callee = callee
        self._own_variables = own_variables
        self._constant_of: dict[int, Var] = {}  # by the identity of its value

    def add(self, eqns: Iterable[JaxprEqn], renamed: dict[Var, Atom], call: JaxprEqn | None = None) -> None:
        """Appends equations; they come from the function of ``call``, if any.

        Args:
          renamed: for each variable that the equations read, its value here. The variables that the equations
            define are added.
        """
        for eqn in eqns:
            eqn = substitute(eqn, renamed)
            if call is not None:
                eqn = as_called(call, eqn)
            if (callee := self._callee(eqn)) is not None:
                renamed.update(zip(eqn.outvars, self.open(eqn, callee, eqn.invars), strict=True))
                continue
            if call is not None or self._own_variables:
                outvars = [type(var)(var.aval) for var in eqn.outvars]
                renamed.update(zip(eqn.outvars, outvars, strict=True))
                eqn = eqn.replace(outvars=outvars)
            self.append(eqn)

    def open(self, call: JaxprEqn, callee: ClosedJaxpr, operands: Iterable[Atom]) -> list[Atom]:
        inside = self.constants_of(callee)
        inside.update(zip(callee.jaxpr.invars, operands, strict=True))
        self.add(callee.jaxpr.eqns, inside, call)
        return [lookup(atom, inside) for atom in callee.jaxpr.outvars]

    def append(self, eqn: JaxprEqn) -> None:
        self.eqns.append(eqn)

    def constants_of(self, function: ClosedJaxpr) -> dict[Var, Atom]:
        pairs = zip(function.jaxpr.constvars, function.consts, strict=True)
        return {var: self.constant(var, value) for var, value in pairs}

    def constant(self, var: Var, value: Any) -> Var:
        if id(value) not in self._constant_of:
            self._constant_of[id(value)] = new = Var(var.aval)
            self.constants[new] = value
        return self._constant_of[id(value)]
