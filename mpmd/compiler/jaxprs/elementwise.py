"""Finds the values that are combined with one another element by element.

So a weight is in one class with its gradient and with its Adam moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.cost import is_elementwise
from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.equations import aval_of, operands


def elementwise_classes(eqns: Iterable[JaxprEqn]) -> Mapping[Var, Var]:
    """Returns a representative for each variable of an elementwise equation, equal for connected variables.

    An elementwise equation connects its operands and results that have the same shape, unless they are
    scalars: a weight with its gradient and with the optimizer's state for the weight.
    """
    connected: DisjointSets[Var] = DisjointSets()
    for eqn in eqns:
        if is_elementwise(eqn) and len(eqn.outvars) == 1:
            out = eqn.outvars[0]
            for var in operands(eqn):
                if aval_of(var).shape == aval_of(out).shape != ():
                    connected.join([out, var])
    return connected.representatives()
