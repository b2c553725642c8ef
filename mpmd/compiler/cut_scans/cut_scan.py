"""A scan over layers as one scan for each of its ranges, with marks where stages end in between."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.extend.core.primitives import scan_p

from mpmd.compat import scan_counts
from mpmd.compiler.cut_scans.layer_ranges import MarkedScan, in_ranges
from mpmd.language.annotate import Boundary, bind_mark
from mpmd.util.tree import with_leaves


def cut_scan(
    params: Mapping[str, Any],
    operands: Sequence[Any],
    marked: Sequence[int],
    ends: Mapping[int, Boundary],
    bodies: Sequence[tuple[int, ClosedJaxpr]],
    notes: Sequence[MarkedScan | None] = (),
) -> list[Any]:
    """The results of a scan.

    Args:
      params: of the scan's equation.
      operands: the values of the scan's constants, its initial carry, and the arrays that it scans over.
      marked: the positions of marked values among the carried values.
      ends: the numbers of iterations, counted as they run, after which stages end.
      bodies: bodies without marks, each with the number of iterations behind the last one that it computes.
        Ranges with the same body share the object, so that JAX differentiates it once.
      notes: for each array that it scans over, what ``layers_p`` notes of the scan; empty: nothing.
    """
    num_consts, num_carry = scan_counts(params)
    consts, carry, xs = (
        list(operands[:num_consts]),
        list(operands[num_consts : num_consts + num_carry]),
        operands[num_consts + num_carry :],
    )
    stops = sorted({params["length"], *(end for end in ends if end), *(stop for stop, _ in bodies)})
    sizes = [stop - start for start, stop in itertools.pairwise([0, *stops])]
    step = -1 if params["reverse"] else 1  # a reverse scan begins with the last row
    in_order = sizes[::step]
    noted = zip(xs, notes or [None] * len(xs), strict=True)
    rows = [_split(in_ranges(x, in_order, note), in_order)[::step] for x, note in noted]
    stacked: list[Sequence[Any]] = []

    @functools.cache  # ranges of one length are one function under jit, which JAX differentiates once
    def run_range(body: ClosedJaxpr, length: int) -> Callable[..., list[Any]]:
        of_range = {"jaxpr": body, "length": length, "unroll": min(params["unroll"], length)}
        return jax.jit(functools.partial(scan_p.bind, **{**params, **of_range}))

    if 0 in ends:
        carry = _marked(carry, marked, ends[0])
    for number, stop in enumerate(stops):
        body = next(body for last, body in bodies if stop <= last)
        x = [ranges[number] for ranges in rows]
        results = run_range(body, sizes[number])(*consts, *carry, *x)
        stacked.append(results[num_carry:])
        last_row = 0 if params["reverse"] else -1
        carry = _carried(body.jaxpr, num_consts, carry, results[:num_carry], x, last_row)
        if stop in ends:
            carry = _marked(carry, marked, ends[stop])
    joined = [
        lax.concatenate(ranges[::step], 0) if len(ranges) > 1 else ranges[0]
        for ranges in zip(*stacked, strict=True)
    ]
    return [*carry, *(in_ranges(y, in_order) for y in joined)]


def _split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    return [x] if len(sizes) == 1 else list(lax.split(x, sizes))


def _carried(
    body: Jaxpr,
    num_consts: int,
    before: Sequence[Any],
    after: Sequence[Any],
    rows: Sequence[Any],
    last_row: int,
) -> list[Any]:
    """The carry behind a range.

    Values that the body leaves unchanged, or takes from its rows, are not read from the scan, so that no
    range waits for another one to have them.
    """
    inputs = {var: i - num_consts for i, var in enumerate(body.invars)}
    carried = list(after)
    for i, atom in enumerate(body.outvars[: len(before)]):
        position = inputs.get(atom, -1) if isinstance(atom, Var) else -1
        if position == i:
            carried[i] = before[i]
        elif position >= len(before):
            carried[i] = lax.index_in_dim(rows[position - len(before)], last_row, keepdims=False)
    return carried


def _marked(carry: Sequence[Any], positions: Sequence[int], boundary: Boundary) -> list[Any]:
    if not positions:
        return list(carry)
    return with_leaves(carry, positions, bind_mark([carry[i] for i in positions], boundary))
