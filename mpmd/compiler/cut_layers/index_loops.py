"""Refuses marked loops that take rows of arrays by a counter, and says what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from mpmd.compiler.jaxprs.equations import Atom, aval_of, is_among, operands
from mpmd.compiler.jaxprs.marks import marks_in
from mpmd.compiler.jaxprs.remat import without_remat
from mpmd.compiler.jaxprs.scans import scan_operands
from mpmd.compiler.jaxprs.source import where
from mpmd.errors import CompileError
from mpmd.language.reduce import treduce_p


def check_index_loops(jaxpr: Jaxpr, constants: Mapping[Var, Any]) -> None:
    """Raises ``CompileError`` for marked loops such as ``fori_loop(0, L, lambda i, h: layer(w[i], h), h)``.

    As far as its equation says, each iteration of such a loop reads all of ``w``, so no stage has layers of
    its own.

    Args:
      constants: the values of the variables that the step reads besides its arguments.
    """
    counting = {var for var, value in constants.items() if _is_range(value)}
    if faults := dict.fromkeys(_faults(jaxpr, counting)):
        raise CompileError(list(faults))


def _is_range(value: Any) -> bool:
    if jnp.ndim(value) != 1 or len(value) < 2 or not jnp.issubdtype(jnp.asarray(value).dtype, jnp.integer):
        return False
    steps = np.diff(np.asarray(value).astype(np.int64))
    return bool(steps[0] and (steps == steps[0]).all())


def _faults(jaxpr: Jaxpr, counting: Set[Var]) -> Iterator[str]:
    """The faults of a step, or of the body of its loop.

    Args:
      counting: variables with the numbers of a range.
    """
    counting = set(counting)
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            body: Jaxpr = eqn.params["body"]
            passed_on = zip(body.invars, eqn.invars, strict=False)
            yield from _faults(body, {inner for inner, atom in passed_on if is_among(atom, counting)})
        elif eqn.primitive.name == "scan":
            yield from _faults_of_scan(eqn, counting)
        elif eqn.primitive.name == "iota" or _counts_on(eqn, counting):
            counting.update(eqn.outvars)


def _counts_on(eqn: JaxprEqn, counting: Set[Var], fixed: Set[Var] = frozenset()) -> bool:
    """Whether an equation computes integers, such as indices, of counters and values of ``fixed`` alone."""
    read = operands(eqn)
    are_integers = not any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in eqn.outvars)
    return are_integers and any(var in counting for var in read) and counting | fixed >= set(read)


def _faults_of_scan(scan: JaxprEqn, counting_outside: Set[Var]) -> Iterator[str]:
    body: Jaxpr = scan.params["jaxpr"].jaxpr
    if not any(mark.forward and not mark.linear for _, mark in marks_in(body)):
        return
    eqns = without_remat(body.eqns)
    roles = scan_operands(scan)
    before, after = body.invars[roles.carry], body.outvars[: roles.num_carry]
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    counting = {var for var, atom in zip(before, after, strict=True) if _is_counter(var, atom, made_by)}
    scanned = zip(body.invars[roles.xs], scan.invars[roles.xs], strict=True)
    counting |= {var for var, atom in scanned if is_among(atom, counting_outside)}
    unchanged = {var for var, atom in zip(before, after, strict=True) if atom is var}
    fixed = {*body.invars[roles.consts], *unchanged}
    for eqn in eqns:
        if _counts_on(eqn, counting, fixed):
            counting.update(eqn.outvars)
        elif eqn.primitive.name in ("dynamic_slice", "gather") and eqn.invars[0] in fixed:
            yield from (_fault(scan, eqn) for index in eqn.invars[1:] if is_among(index, counting))


def _is_counter(before: Var, after: Atom, made_by: Mapping[Var, JaxprEqn]) -> bool:
    """Whether a carried value is a counter: each iteration adds the same number to it."""
    if isinstance(after, Literal) or after not in made_by:
        return False
    eqn = made_by[after]
    return eqn.primitive.name in ("add", "sub") and operands(eqn) == [before]


def _fault(scan: JaxprEqn, access: JaxprEqn) -> str:
    return (
        f"the loop at {where(scan)} has a mark, and takes rows of an array by its counter at "
        f"{where(access)}, so each stage reads the whole array. Scan over the array, or the tree of arrays:\n"
        "    def body(h, layer): ...           # in place of body(i, h), and layer in place of w[i]\n"
        "    h, _ = jax.lax.scan(body, h, w)   # in place of jax.lax.fori_loop(0, n, body, h)"
    )
