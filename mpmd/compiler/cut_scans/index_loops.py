"""Refuses marked loops that take rows of arrays by a counter, and says what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compat import scan_counts
from mpmd.compiler.cut_scans.layer_ranges import layers_p
from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.equations import is_among, is_index, operands, shape_of
from mpmd.compiler.jaxprs.marks import closed_over
from mpmd.compiler.jaxprs.remat import without_remat
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

_ADDING = frozenset("add sub convert_element_type".split())
"""Primitives that make a counter of a carried number. A number that a loop doubles, limits or sets back, such
as a dilation, numbers no layers."""

_TAKING = frozenset("dynamic_slice gather dynamic_update_slice scatter scatter-add scatter-mul".split())


def index_faults(params: Mapping[str, Any], mark: str) -> list[str | None]:
    """For each array that a marked scan scans over, the error if its elements number layers.

    In a loop such as ``fori_loop(0, L, lambda i, h: layer(w[i], h), h)``, each iteration reads all of ``w``,
    so no stage has layers of its own. Vectors, and tables with fewer rows than the loop has iterations, may
    be taken in any way: each stage has them whole.

    Args:
      params: of the scan's equation.
      mark: the line of a mark in the body.

    Raises: ``CompileError`` for rows that the body takes by a counter that it carries.
    """
    num_consts, num_carry = scan_counts(params)
    if not any(map(is_index, params["jaxpr"].jaxpr.invars[num_consts:])):
        return [None] * (len(params["jaxpr"].in_avals) - num_consts - num_carry)
    body, values = canonical(params["jaxpr"])
    eqns = without_remat(body.eqns)
    num_consts += len(values)
    carried = list(zip(body.invars[num_consts:], body.outvars[:num_carry], strict=False))
    fixed = {*body.invars[:num_consts], *(before for before, after in carried if after is before)}
    for eqn in eqns:
        if fixed.issuperset(operands(eqn)):
            fixed.update(eqn.outvars)
    arrays = fixed.union(before for before, _ in carried)

    def faults(numbers: Iterable[Var]) -> dict[str, None]:
        counting = _indices(eqns, numbers, fixed)
        taking = (eqn for eqn in eqns if _takes_rows(eqn, arrays, counting, params["length"]))
        return dict.fromkeys(_fault(mark, eqn) for eqn in taking)

    counters = [
        before
        for before, after in carried
        if is_index(before)
        and after is not before
        and is_among(after, _indices(eqns, [before], fixed, _ADDING))
    ]
    if by_counter := faults(counters):
        raise CompileError(list(by_counter))
    rows = body.invars[num_consts + num_carry :]
    return [next(iter(faults([*counters, row])), None) if is_index(row) else None for row in rows]


def check_index_loops(jaxpr: Jaxpr, constants: Mapping[Var, Any]) -> None:
    """Raises ``CompileError`` for marked scans over arrays that number layers, with an ``index_fault``.

    Args:
      constants: the values of the variables that the step reads besides its arguments.
    """
    counting = {var for var, value in constants.items() if _is_order(value)}
    if faults := dict.fromkeys(_faults(jaxpr.eqns, counting)):
        raise CompileError(list(faults))


def _is_order(value: Any) -> bool:
    """Whether a constant numbers layers in some order, rather than says of which of two kinds each is."""
    if jnp.ndim(value) != 1 or not jnp.issubdtype(jnp.asarray(value).dtype, jnp.integer):
        return False
    return len(value) > 2 and len(np.unique(np.asarray(value))) == len(value)


def _faults(eqns: Iterable[JaxprEqn], counting: set[Var]) -> Iterator[str]:
    """The faults of a step, or of one of its loops; adds to the variables ``counting`` that number layers."""
    for eqn in eqns:
        if eqn.primitive is treduce_p:
            body: Jaxpr = eqn.params["body"]
            inside = {var for var, atom in closed_over(eqn).items() if is_among(atom, counting)}
            yield from _faults(body.eqns, inside)
        elif eqn.primitive is layers_p and (scan := eqn.params["scan"]) and scan.index_fault:
            if is_among(eqn.invars[0], counting):
                yield scan.index_fault
        elif eqn.primitive.name == "iota" or _counts_on(eqn, counting):
            counting.update(eqn.outvars)


def _indices(
    eqns: Iterable[JaxprEqn], numbers: Iterable[Var], fixed: Set[Var], primitives: Set[str] = _COUNTING
) -> set[Var]:
    counting = set(numbers)
    for eqn in eqns:
        if _counts_on(eqn, counting, fixed, primitives):
            counting.update(eqn.outvars)
    return counting


def _counts_on(
    eqn: JaxprEqn, counting: Set[Var], fixed: Set[Var] = frozenset(), primitives: Set[str] = _COUNTING
) -> bool:
    read = set(operands(eqn))
    return eqn.primitive.name in primitives and not read.isdisjoint(counting) and read <= counting | fixed


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


def _fault(mark: str, access: JaxprEqn) -> str:
    return (
        f"the loop with mark_stage_end at {mark} takes rows of an array by its counter at {where(access)}, "
        "so each stage has the whole array. Scan over the array, or the tree of arrays:\n"
        "    def body(h, layer): ...           # in place of body(i, h), and layer in place of w[i]\n"
        "    h, _ = jax.lax.scan(body, h, w)   # in place of jax.lax.fori_loop(0, n, body, h)\n"
        "In another order, scan over w[order]. Rows that iterations write are what body returns beside h."
    )
