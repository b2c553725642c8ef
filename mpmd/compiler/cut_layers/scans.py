"""The rule for scans over layers without marks: a scan for each layer range."""

from __future__ import annotations

from functools import reduce

from jax import lax

from mpmd.compiler.cut_layers.layer_scans import LayerScan
from mpmd.compiler.cut_layers.values import Values, zeros_like
from mpmd.compiler.jaxprs.equations import Atom
from mpmd.ir.stack import Stack


def add_scan(values: Values, scan: LayerScan, sizes: tuple[int, ...]) -> None:
    """Adds a scan for each layer range, in the order in which the original scan visits the layers.

    Args:
      sizes: the sizes of the layer ranges of the arrays that the scan reads.
    """
    eqn, roles, stack = scan.eqn, scan.operands, Stack(0, sizes)
    fixed = [values.whole(atom, eqn) for atom in eqn.invars[roles.consts]]
    carry = [values.whole(atom, eqn) for atom in eqn.invars[roles.carry]]
    xs = [values.ranges(atom, stack, eqn) for atom in eqn.invars[roles.xs]]
    stacked_vars = eqn.outvars[roles.num_carry :]
    ys = [values.range_vars(var, stack) for var in stacked_vars]
    sums: dict[int, list[Atom]] = {i: [] for i in scan.added_to}
    for number, p in enumerate(range(len(sizes))[:: -1 if eqn.params["reverse"] else 1]):
        if number:  # the first part adds to what there is, the others to nothing
            carry = [zeros_like(values, a, eqn) if i in sums else a for i, a in enumerate(carry)]
        after = [values.var_like(var) for var in eqn.outvars[: len(carry)]]
        values.emit(
            eqn,
            [*fixed, *carry, *(ranges[p] for ranges in xs)],
            [*after, *(ranges[p] for ranges in ys)],
            length=sizes[p],
            unroll=min(eqn.params["unroll"], sizes[p]),
        )
        for i, summands in sums.items():
            summands.append(after[i])
        carry = [carry[i] if i in scan.unchanged else var for i, var in enumerate(after)]
    for i, summands in sums.items():
        (carry[i],) = values.trace(lambda *xs: [reduce(lax.add, xs)], summands, eqn)
    for var, atom in zip(eqn.outvars[: roles.num_carry], carry, strict=True):
        values.set_whole(var, atom)
    for var, ranges in zip(stacked_vars, ys, strict=True):
        if values.planned(var) == stack:
            values.set_ranges(var, ranges)
        else:
            values.set_whole(var, values.joined(ranges, 0, eqn))
