"""A function as one sequence of equations, without the calls that would hide its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters import partial_eval

from mpmd.compiler.jaxprs.canonical import called
from mpmd.compiler.jaxprs.equations import Atom, as_called, is_remat, lookup, substitute, with_eqns

_JITS = frozenset({"jit", "closed_call", "eval_jaxpr"})


@dataclasses.dataclass(frozen=True, eq=False)
class Rematerialised:
    """An opened function under ``jax.checkpoint``, with the arguments of ``jax.checkpoint``."""

    policy: Any
    prevent_cse: Any


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
    remat: tuple[Rematerialised | None, ...]


def open_function(function: ClosedJaxpr, should_open: Callable[[JaxprEqn], bool]) -> OpenFunction:
    """Opens ``jit`` and rematerialised functions where ``should_open`` says so, recursively.

    Functions with derivatives of their own stay calls. Equations that no result needs are left out.
    """
    live, _ = partial_eval.dce_jaxpr(function.jaxpr, [True] * len(function.jaxpr.outvars), instantiate=True)
    opening = _Opening(should_open)
    opening.constants.update(zip(function.jaxpr.constvars, function.consts, strict=True))
    outvars = opening.emit(live, {}, None, None)
    jaxpr = with_eqns(live, opening.eqns, constvars=[], outvars=outvars)
    return OpenFunction(jaxpr, opening.constants, tuple(opening.remat))


class _Opening:
    def __init__(self, should_open: Callable[[JaxprEqn], bool]):
        self._should_open = should_open
        self.eqns: list[JaxprEqn] = []
        self.remat: list[Rematerialised | None] = []
        self.constants: dict[Var, Any] = {}

    def emit(
        self,
        jaxpr: Jaxpr,
        renamed: dict[Var, Atom],
        call: JaxprEqn | None,
        remat: Rematerialised | None,
    ) -> list[Atom]:
        """Adds the equations of a jaxpr that ``call`` calls; returns its results."""
        for eqn in jaxpr.eqns:
            eqn = substitute(eqn, renamed)
            if call is not None:
                eqn = as_called(call, eqn)
            if (inner := self._opened(eqn)) is not None:
                body, within = inner
                names: dict[Var, Atom] = dict(zip(body.jaxpr.invars, eqn.invars, strict=True))
                for var, value in zip(body.jaxpr.constvars, body.consts, strict=True):
                    names[var] = constant = Var(var.aval)
                    self.constants[constant] = value
                results = self.emit(body.jaxpr, names, eqn, within or remat)
                renamed.update(zip(eqn.outvars, results, strict=True))
                continue
            if call is not None:  # the same jaxpr may be called again: its variables need to be new
                outvars = [Var(var.aval) for var in eqn.outvars]
                renamed.update(zip(eqn.outvars, outvars, strict=True))
                eqn = eqn.replace(outvars=outvars)
            self.eqns.append(eqn)
            self.remat.append(remat)
        return [lookup(atom, renamed) for atom in jaxpr.outvars]

    def _opened(self, eqn: JaxprEqn) -> tuple[ClosedJaxpr, Rematerialised | None] | None:
        is_call = eqn.primitive.name in _JITS
        if not (is_call or is_remat(eqn)) or not self._should_open(eqn):
            return None
        if is_call:
            body = called(eqn)
            assert body is not None, f"{eqn.primitive} calls nothing"
            return body, None
        policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
        return ClosedJaxpr(eqn.params["jaxpr"], ()), Rematerialised(policy, prevent_cse)
