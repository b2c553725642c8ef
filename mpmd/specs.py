"""Finds out how values outside the loop are sharded, from the shardings of arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.cost import is_elementwise
from mpmd.ir import Spec
from mpmd.jaxpr import aval_of, operands


def infer_specs(eqns: Sequence[JaxprEqn], known: Mapping[Var, Spec]) -> dict[Var, Spec]:
    """Extends known specs through elementwise equations, among values of the same shape.

    So the gradient accumulators and the optimizer's state of a weight are sharded like the weight: what an
    optimizer combines element by element has to be together. Where two specs meet, neither spreads.

    Args:
      eqns: the equations outside the loop.
      known: the specs of arguments and results.
    """
    parent: dict[Var, Var] = {}

    def find(var: Var) -> Var:
        while parent.setdefault(var, var) is not var:
            parent[var] = parent[parent[var]]
            var = parent[var]
        return var

    for eqn in eqns:
        if is_elementwise(eqn) and len(eqn.outvars) == 1:
            out = eqn.outvars[0]
            for var in operands(eqn):
                if aval_of(var).shape == aval_of(out).shape != ():
                    parent[find(var)] = find(out)
    specs: dict[Var, set[Spec]] = {}
    for var, spec in known.items():
        specs.setdefault(find(var), set()).add(spec)
    inferred = {
        var: next(iter(specs[find(var)])) for var in list(parent) if len(specs.get(find(var), ())) == 1
    }
    return {**inferred, **known}
