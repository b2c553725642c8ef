"""Scans that compute a part of the results of another scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    closed,
    free_variables,
    lookup,
    make_jaxpr,
    substitute,
    variables,
)
from mpmd.compiler.jaxprs.scans import Scan, computed
from mpmd.compiler.jaxprs.traced import traced_eqns


def part_of_scan(
    scan: Scan,
    eqns: Sequence[JaxprEqn],
    results: Set[int],
    extra_inputs: Mapping[Var, Atom] | None = None,
    extra_outputs: Sequence[Var] = (),
    extra_constants: Mapping[Var, Atom] | None = None,
) -> tuple[list[JaxprEqn], list[Var]]:
    """A scan of the body's ``eqns`` for ``results``, and the variables of the stacked extras.

    Args:
      results: indices of the scan's results.
      extra_inputs: variables of the body that are read from stacked values.
      extra_outputs: variables of the body to stack.
      extra_constants: variables of the body that are the same in all iterations.
    """
    eqn, carry = scan.eqn, scan.body.invars[scan.carry]
    carried = sorted(i for i in results if i < scan.num_carry)
    stacked = sorted(results - set(carried))
    outputs = [scan.body.outvars[i] for i in (*carried, *stacked)] + list(extra_outputs)
    read = {*free_variables(eqns), *variables(outputs)}
    consts = {**scan.operands(scan.consts), **(extra_constants or {})}
    consts = {var: atom for var, atom in consts.items() if var in read}
    xs = {**scan.operands(scan.xs), **(extra_inputs or {})}
    xs = {var: atom for var, atom in xs.items() if var in read}
    invars = [*consts, *(carry[i] for i in carried), *xs]
    run = jaxpr_as_fun(closed(make_jaxpr(invars, eqns, outputs)))

    def part(*operands):
        first_row = len(consts) + len(carried)
        fixed, inputs = operands[: len(consts)], operands[first_row:]
        initial = list(operands[len(consts) : first_row])

        def one(carry, x):
            values = computed(run(*fixed, *carry, *x), [*carry, *x])
            return values[: len(carried)], values[len(carried) :]

        reverse, unroll = eqn.params["reverse"], eqn.params["unroll"]
        final, stacks = lax.scan(one, initial, inputs, scan.length, reverse, unroll)
        return [*final, *stacks]

    first = eqn.invars[scan.carry]
    operands = [*consts.values(), *(first[i] for i in carried), *xs.values()]
    new_eqns, values = traced_eqns(part, operands)
    outvars = [eqn.outvars[i] for i in (*carried, *stacked)]
    extras = [Var(aval_of(value)) for value in values[len(outvars) :]]
    new_eqns = [new.replace(source_info=eqn.source_info) for new in new_eqns]
    return named(new_eqns, values, [*outvars, *extras]), extras


def named(eqns: Sequence[JaxprEqn], values: Sequence[Atom], names: Sequence[Var]) -> list[JaxprEqn]:
    """Renames the results ``values`` of equations to ``names``, in the same order.

    A value that no equation computes, such as a scan's operand that it returns, or that occurs twice, is
    copied.
    """
    computed = {var for eqn in eqns for var in eqn.outvars}
    renamed: dict[Var, Var] = {}
    copied: list[tuple[Var, Atom]] = []
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Var) and value in computed and value not in renamed:
            renamed[value] = name
        else:
            copied.append((name, value))
    named = [
        substitute(eqn, renamed).replace(outvars=[renamed.get(var, var) for var in eqn.outvars])
        for eqn in eqns
    ]
    for name, value in copied:
        copies, _ = traced_eqns(lambda x: [jnp.copy(x)], [lookup(value, renamed)])
        named.append(copies[-1].replace(outvars=[name]))
    return named
