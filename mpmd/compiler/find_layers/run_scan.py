"""Runs a scan over layers with marks between iterations, and with iterations under ``jax.checkpoint``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.find_layers.open_function import Rematerialised
from mpmd.compiler.find_layers.rematerialised import rematerialised
from mpmd.compiler.jaxprs.equations import aval_of, operands
from mpmd.compiler.jaxprs.scans import scan_operands
from mpmd.language.annotate import Boundary, mark_p
from mpmd.language.remat import Remat


def run_scan(
    eqn: JaxprEqn,
    values: Sequence[Any],
    ends: Mapping[int, str],
    ranges: Sequence[tuple[int, Remat]],
    opened: Rematerialised | None = None,
) -> list[Any]:
    """The results of a scan over layers.

    Args:
      ends: the iterations after which stages end, in order, and the names of these ends.
      ranges: the policies of iterations, each with the iteration behind the last one. Each is a scan.
      opened: the function under ``jax.checkpoint`` around the scan, which has been opened.
    """
    roles, params = scan_operands(eqn), eqn.params
    consts, carry, xs = (list(values[part]) for part in (roles.consts, roles.carry, roles.xs))
    handed_over = _handed_over(params["jaxpr"].jaxpr, roles.carry)
    starts = [0, *(stop for stop, _ in ranges[:-1])]
    sizes = [stop - start for start, (stop, _) in zip(starts, ranges, strict=True)]
    step = -1 if params["reverse"] else 1  # a reverse scan begins with the last row
    rows = [_parts(x, sizes[::step])[::step] for x in xs]
    stacked: list[list[Any]] = []
    for number, (start, (stop, policy)) in enumerate(zip(starts, ranges, strict=True)):
        if start in ends:
            boundary = Boundary(None, by_auto_marks=True, ends=(ends[start],))
            marked = marked_values([carry[i] for i in handed_over], boundary)
            carry = _with(carry, handed_over, marked)
        body = rematerialised(params["jaxpr"], policy, prevent_cse=False)
        if opened is not None:
            body = jax.checkpoint(body, policy=opened.policy, prevent_cse=False)
        within = {end - start: name for end, name in ends.items() if start < end < stop}
        one = _iteration(body, consts, len(carry), handed_over, within)
        carry, ys = lax.scan(
            one, carry, [x[number] for x in rows], stop - start, params["reverse"], params["unroll"]
        )
        stacked.append(ys)
    if len(stacked) == 1:
        return [*carry, *stacked[0]]
    return [*carry, *(jnp.concatenate(parts) for parts in zip(*stacked[::step], strict=True))]


def _parts(x: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive rows of an array. The derivative of this concatenates."""
    return [x] if len(sizes) == 1 else list(lax.split(x, sizes))


def _iteration(
    body: Any, consts: list[Any], num_carry: int, handed_over: Sequence[int], ends: Mapping[int, str]
) -> Any:
    """An iteration, with marks on the values that it hands over if stages end after some."""
    every = tuple(b - a for a, b in itertools.pairwise([0, *ends]))
    boundary = Boundary(None, every=every, has_rest=True, by_auto_marks=True, ends=tuple(ends.values()))

    def one(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = list(body(*consts, *carry, *x))
        if ends:
            results = _with(results, handed_over, marked_values([results[i] for i in handed_over], boundary))
        return results[:num_carry], results[num_carry:]

    return one


def _with(values: Sequence[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values with others at some positions."""
    changed = list(values)
    for position, value in zip(positions, others, strict=True):
        changed[position] = value
    return changed


def _handed_over(body: Jaxpr, carry: slice) -> list[int]:
    """The positions of carried values that depend on carried floats: no counters, and no unchanged values."""
    before = body.invars[carry]
    changed = [i for i, var in enumerate(before) if body.outvars[i] is not var]
    reached = {before[i] for i in changed if jnp.issubdtype(aval_of(before[i]).dtype, jnp.inexact)}
    for eqn in body.eqns:
        if any(var in reached for var in operands(eqn)):
            reached.update(eqn.outvars)
    return [i for i in changed if body.outvars[i] in reached]


def marked_values(values: Sequence[Any], boundary: Boundary) -> list[Any]:
    return mark_p.bind(*values, boundary=boundary, forward=True, linear=False)
