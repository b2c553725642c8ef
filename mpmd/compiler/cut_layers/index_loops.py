"""Refuses marked loops that take rows of arrays by a counter, and says what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, is_among, operands, shape_of
from mpmd.compiler.jaxprs.marks import marks_in
from mpmd.compiler.jaxprs.remat import without_remat
from mpmd.compiler.jaxprs.scans import scan_operands
from mpmd.compiler.jaxprs.source import where
from mpmd.errors import CompileError
from mpmd.language.reduce import treduce_p

_COUNTING = frozenset(
    """
    add sub mul neg max min clamp lt le gt ge select_n convert_element_type broadcast_in_dim reshape squeeze
    concatenate
    """.split()
)
"""Primitives of which indices are made; random bits and remainders of a counter are none."""

_TAKING = frozenset("dynamic_slice gather dynamic_update_slice scatter scatter-add scatter-mul".split())


def check_index_loops(jaxpr: Jaxpr, constants: Mapping[Var, Any]) -> None:
    """Raises ``CompileError`` for marked loops such as ``fori_loop(0, L, lambda i, h: layer(w[i], h), h)``.

    As far as its equation says, each iteration of such a loop reads all of ``w``, so no stage has layers of
    its own. Vectors, and tables with fewer rows than the loop has iterations, may be taken in any way: each
    stage has them whole.

    Args:
      constants: the values of the variables that the step reads besides its arguments.
    """
    counting = {var for var, value in constants.items() if _is_order(value)}
    if faults := dict.fromkeys(_faults(jaxpr, counting)):
        raise CompileError(list(faults))


def _is_order(value: Any) -> bool:
    """Whether a constant numbers layers in some order, rather than says of which of two kinds each is."""
    if jnp.ndim(value) != 1 or not jnp.issubdtype(jnp.asarray(value).dtype, jnp.integer):
        return False
    return len(value) > 2 and len(np.unique(np.asarray(value))) == len(value)


def _faults(jaxpr: Jaxpr, counting: Set[Var]) -> Iterator[str]:
    """The faults of a step, or of the body of its loop.

    Args:
      counting: variables with the numbers of layers.
    """
    counting = set(counting)
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            body: Jaxpr = eqn.params["body"]
            passed_on = zip(body.invars, eqn.invars, strict=False)
            yield from _faults(body, {inner for inner, atom in passed_on if is_among(atom, counting)})
        elif eqn.primitive.name == "scan":
            yield from _faults_of_scan(eqn, counting)
        elif eqn.primitive.name == "iota" or _counts_on(eqn, counting, frozenset()):
            counting.update(eqn.outvars)


def _counts_on(eqn: JaxprEqn, counting: Set[Var], fixed: Set[Var]) -> bool:
    """Whether an equation computes indices of counters, and of values that no iteration changes."""
    read = set(operands(eqn))
    return eqn.primitive.name in _COUNTING and not read.isdisjoint(counting) and read <= counting | fixed


def _faults_of_scan(scan: JaxprEqn, counting_outside: Set[Var]) -> Iterator[str]:
    body: Jaxpr = scan.params["jaxpr"].jaxpr
    if not any(mark.forward and not mark.linear for _, mark in marks_in(body)):
        return
    eqns = without_remat(body.eqns)
    roles = scan_operands(scan)
    before, after = body.invars[roles.carry], body.outvars[: roles.num_carry]
    unchanged = {var for var, atom in zip(before, after, strict=True) if atom is var}
    fixed = {*body.invars[roles.consts], *unchanged}
    for eqn in eqns:
        if fixed.issuperset(operands(eqn)):
            fixed.update(eqn.outvars)
    counting = {var for var, atom in zip(before, after, strict=True) if _is_counter(var, atom, eqns, fixed)}
    scanned = zip(body.invars[roles.xs], scan.invars[roles.xs], strict=True)
    counting |= {var for var, atom in scanned if is_among(atom, counting_outside)}
    for eqn in eqns:
        if _takes_rows(eqn, fixed | set(before), counting, scan.params["length"]):
            yield _fault(scan, eqn)
        elif _counts_on(eqn, counting, fixed):
            counting.update(eqn.outvars)


def _is_counter(before: Var, after: Atom, eqns: Sequence[JaxprEqn], fixed: Set[Var]) -> bool:
    """Whether each iteration adds the same number to a carried value."""
    counted = {before}
    for eqn in eqns:
        read = set(operands(eqn))
        is_sum = eqn.primitive.name in ("add", "sub", "convert_element_type")
        if is_sum and not read.isdisjoint(counted) and read <= counted | fixed:
            counted.update(eqn.outvars)
    return not shape_of(before) and after is not before and is_among(after, counted)


def _takes_rows(eqn: JaxprEqn, arrays: Set[Var], counting: Set[Var], length: int) -> bool:
    """Whether an equation takes or changes rows of an array by a counter, which may be rows of each layer."""
    if eqn.primitive.name not in _TAKING or not is_among(array := eqn.invars[0], arrays):
        return False
    numbers = eqn.params.get("dimension_numbers")
    dims: Sequence[int] = ()
    if numbers is None:
        indices = eqn.invars[-len(shape_of(array)) :]
        dims = [dim for dim, index in enumerate(indices) if is_among(index, counting)]
    elif is_among(eqn.invars[1], counting):
        is_gather = eqn.primitive.name == "gather"
        dims = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    return len(shape_of(array)) > 1 and any(shape_of(array)[dim] >= length for dim in dims)


def _fault(scan: JaxprEqn, access: JaxprEqn) -> str:
    return (
        f"the loop at {where(scan)} has a mark, and takes rows of an array by its counter at "
        f"{where(access)}, so each stage has the whole array. Scan over the array, or the tree of arrays:\n"
        "    def body(h, layer): ...           # in place of body(i, h), and layer in place of w[i]\n"
        "    h, _ = jax.lax.scan(body, h, w)   # in place of jax.lax.fori_loop(0, n, body, h)\n"
        "In another order, scan over w[order]. Rows that iterations write are what body returns beside h."
    )
