"""Warns of marks in scans over time or over rows, whose iterations are not layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_scans import MarkedScan, layers_p
from mpmd.compiler.jaxprs.equations import Atom, aval_of, is_among, operands, shape_of
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.source import where
from mpmd.errors import SharedWeightsWarning
from mpmd.language.reduce import treduce_p
from mpmd.util.warn import warn_user


def warn_of_scans_over_data(jaxpr: Jaxpr) -> None:
    """Warns, by a ``SharedWeightsWarning``, of marks in scans that read other data, but the same weights."""
    messages = {
        message: None
        for eqn in jaxpr.eqns
        if eqn.primitive is treduce_p
        for message in _of_loop(eqn.params["body"], len(eqn.invars) - len(eqn.outvars))
    }
    for message in messages:
        warn_user(message, SharedWeightsWarning)


def _of_loop(body: Jaxpr, closed_over: int) -> Iterator[str]:
    of_microbatch: set[Var] = set(body.invars[closed_over:])
    rows: dict[Var, MarkedScan] = {}  # what the ranges of scans with marks scan over
    for eqn in body.eqns:
        scan = next((rows[var] for var in operands(eqn) if var in rows), None)
        if eqn.primitive is layers_p and eqn.params["scan"]:
            rows[eqn.outvars[0]] = eqn.params["scan"]
        elif eqn.primitive.name == "split" and scan:
            rows.update(dict.fromkeys(eqn.outvars, scan))
        elif eqn.primitive.name == "scan" and scan and _is_over_data(eqn, of_microbatch):
            yield _message(scan.mark, where(eqn))
        if not of_microbatch.isdisjoint(operands(eqn)):
            of_microbatch.update(eqn.outvars)


def _message(mark: str, scan: str) -> str:
    return (
        f"mark_stage_end at {mark} is in a scan over data, such as time or rows, at {scan}: its iterations "
        "become stages that all read the same weights, so each group holds all of them. Mark the ends of "
        "stages between layers: around such scans, rather than in them, or in a scan over the stacked "
        "weights of layers"
    )


def _is_over_data(eqn: JaxprEqn, of_microbatch: Collection[Var]) -> bool:
    """Whether iterations read weights, and the arrays that they scan over are only data of the microbatch."""
    scan = Scan.of(eqn)
    xs, consts = eqn.invars[scan.xs], eqn.invars[scan.consts]
    has_data = any(is_among(atom, of_microbatch) and _is_data(atom) for atom in xs)
    has_layers = any(not is_among(atom, of_microbatch) and _is_of_layers(atom) for atom in xs)
    shares_weights = any(not is_among(atom, of_microbatch) and _is_matrix(atom) for atom in consts)
    return has_data and not has_layers and shares_weights


def _is_data(atom: Atom) -> bool:
    """Whether each iteration reads rows of ``atom``, rather than a number or the integers of a random key."""
    dtype = aval_of(atom).dtype
    is_of_keys = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or jnp.issubdtype(
        dtype, jnp.unsignedinteger
    )
    return len(shape_of(atom)) > 1 and not is_of_keys


def _is_of_layers(atom: Atom) -> bool:
    """Whether each iteration may have a weight of its own there, rather than its number."""
    return len(shape_of(atom)) > 1 or jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def _is_matrix(atom: Atom) -> bool:
    return len(shape_of(atom)) > 1 and jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)
