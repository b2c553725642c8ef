"""The rule for scans over values in layer ranges: a scan for each range."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_layers.values import Values
from mpmd.compiler.jaxprs.equations import Atom, operands
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.ir.stack import Stack


def add_scan(values: Values, eqn: JaxprEqn, sizes: tuple[int, ...]) -> None:
    """Adds a scan for each layer range, in the order in which the original scan visits the layers.

    Args:
      sizes: the sizes of the layer ranges of the arrays that the scan reads.
    """
    scan, stack = Scan.of(eqn), Stack(0, sizes)
    fixed = [values.whole(atom, eqn) for atom in eqn.invars[scan.consts]]
    carry = [values.whole(atom, eqn) for atom in eqn.invars[scan.carry]]
    xs = [values.ranges(atom, stack, eqn) for atom in eqn.invars[scan.xs]]
    stacked_vars = [var for var, _ in scan.stacked]
    ys = [values.range_vars(var, stack) for var in stacked_vars]
    sums: dict[int, list[Atom]] = {i: [] for i in _added_to(scan)}
    for number, p in enumerate(range(len(sizes))[:: -1 if eqn.params["reverse"] else 1]):
        if number:  # the first part adds to what there is, the others to nothing
            for i in sums:
                (carry[i],) = values.trace(lambda x: [jnp.zeros_like(x)], [carry[i]], eqn)
        results = [values.var_like(var) for var in eqn.outvars[: len(carry)]]
        values.emit(
            eqn,
            [*fixed, *carry, *(ranges[p] for ranges in xs)],
            [*results, *(ranges[p] for ranges in ys)],
            length=sizes[p],
            unroll=min(eqn.params["unroll"], sizes[p]),
        )
        for i, summands in sums.items():
            summands.append(results[i])
        carry = [
            carry[i] if after is before else results[i] for i, (before, after) in enumerate(scan.carried)
        ]
    for i, summands in sums.items():
        (carry[i],) = values.trace(lambda *xs: [reduce(lax.add, xs)], summands, eqn)
    for var, atom in zip(eqn.outvars[: scan.num_carry], carry, strict=True):
        values.define(var, [atom])
    for var, ranges in zip(stacked_vars, ys, strict=True):
        is_planned = values.planned(var) == stack
        values.define(var, ranges if is_planned else [values.joined(ranges, 0, eqn)])


def _added_to(scan: Scan) -> Iterator[int]:
    """The indices of carried values that iterations only add to, such as the gradient of a weight that all
    layers share. Each part computes its own sum, and the sums are added."""
    return (i for i, pair in enumerate(scan.carried) if _is_only_added_to(scan.body, *pair))


def _is_only_added_to(jaxpr: Jaxpr, before: Var, after: Atom) -> bool:
    """Whether ``after`` is ``before`` plus summands, and ``before`` and each sum in between have a single
    reader."""
    read = [var for eqn in jaxpr.eqns for var in operands(eqn)] + list(jaxpr.outvars)
    reader = {var: eqn for eqn in jaxpr.eqns for var in operands(eqn)}
    var = before
    while read.count(var) == 1 and var in reader:
        eqn = reader[var]
        if eqn.primitive.name not in ("add", "add_any"):
            return False
        var = eqn.outvars[0]
    return var is after and var is not before and read.count(var) == 1
