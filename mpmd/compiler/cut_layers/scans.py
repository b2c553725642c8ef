"""The rule for scans over values in layer ranges: a scan for each range."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from mpmd.compiler.cut_layers.values import Values
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
    for p in range(len(sizes))[:: -1 if eqn.params["reverse"] else 1]:
        results = [values.var_like(var) for var in eqn.outvars[: len(carry)]]
        values.emit(
            eqn,
            [*fixed, *carry, *(ranges[p] for ranges in xs)],
            [*results, *(ranges[p] for ranges in ys)],
            length=sizes[p],
            unroll=min(eqn.params["unroll"], sizes[p]),
        )
        carry = [
            carry[i] if after is before else results[i] for i, (before, after) in enumerate(scan.carried)
        ]
    for var, atom in zip(eqn.outvars[: scan.num_carry], carry, strict=True):
        values.define(var, [atom])
    for var, ranges in zip(stacked_vars, ys, strict=True):
        is_planned = values.planned(var) == stack
        values.define(var, ranges if is_planned else [values.joined(ranges, 0, eqn)])
