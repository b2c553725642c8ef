"""Runs a scan over layers with marks between iterations, and with iterations under ``jax.checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mpmd.compiler.cut_scans import cut_scan
from mpmd.compiler.find_layers.open_function import Rematerialised
from mpmd.compiler.find_layers.rematerialised import rematerialised
from mpmd.compiler.jaxprs.equations import aval_of, is_among, operands
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.language.annotate import Boundary, mark_p
from mpmd.language.remat import Remat
from mpmd.sharding import described


def run_scan(
    eqn: JaxprEqn,
    values: Sequence[Any],
    ends: Mapping[int, str],
    ranges: Sequence[tuple[int, Remat]],
    opened: Rematerialised | None = None,
) -> list[Any]:
    """Runs a scan over layers with marks at the ends of stages, and returns its results.

    Args:
      ends: the iterations after which stages end, in order, with the names of the ends.
      ranges: the policies of iterations, each with the iteration behind the last one. Each is a scan.
      opened: the function under ``jax.checkpoint`` around the scan, which has been opened.
    """
    params, handed_over = eqn.params, _handed_over(Scan.of(eqn))
    boundaries = {end: Boundary(None, by_auto_marks=True, ends=(name,)) for end, name in ends.items()}
    bodies = {policy: _under(params["jaxpr"], policy, opened) for _, policy in ranges}
    each = [(stop, bodies[policy]) for stop, policy in ranges]
    return cut_scan(params, values, handed_over, boundaries, each)


def _under(body: ClosedJaxpr, policy: Remat, opened: Rematerialised | None) -> ClosedJaxpr:
    """The body of a scan under a policy, and under the function that has been opened around it."""
    if policy is Remat.NONE and opened is None:
        return body
    run = rematerialised(body, policy, prevent_cse=False)
    if opened is not None:
        run = jax.checkpoint(run, policy=opened.policy, prevent_cse=False)
    return jax.make_jaxpr(run)(*map(described, body.in_avals))


def _handed_over(scan: Scan) -> list[int]:
    """The positions of carried values that depend on carried floats: no counters, and no unchanged values."""
    changed = {i: before for i, (before, after) in enumerate(scan.carried) if after is not before}
    reached = {var for var in changed.values() if jnp.issubdtype(aval_of(var).dtype, jnp.inexact)}
    for eqn in scan.body.eqns:
        if any(var in reached for var in operands(eqn)):
            reached.update(eqn.outvars)
    return [i for i in changed if is_among(scan.body.outvars[i], reached)]


def marked_values(values: Sequence[Any], boundary: Boundary) -> list[Any]:
    return mark_p.bind(*values, boundary=boundary, forward=True, linear=False)
