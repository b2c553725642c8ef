"""Warns of marks in scans over time or over rows, whose iterations are not layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.cut_scans import MarkedScan, layers_p
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    dependents,
    is_among,
    is_inexact,
    operands,
    shape_of,
)
from mpmd.compiler.jaxprs.marks import closed_over
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.source import where
from mpmd.errors import SharedWeightsWarning
from mpmd.language.reduce import treduce_p
from mpmd.util.warn import warn_user


def warn_of_scans_over_data(jaxpr: Jaxpr) -> None:
    loops = (eqn for eqn in jaxpr.eqns if eqn.primitive is treduce_p)
    for message in dict.fromkeys(message for loop in loops for message in _of_loop(loop)):
        warn_user(message, SharedWeightsWarning)


def _of_loop(loop: JaxprEqn) -> Iterator[str]:
    body: Jaxpr = loop.params["body"]
    index_and_states = body.invars[len(closed_over(loop)) :]
    of_microbatch = dependents(body.eqns, index_and_states)
    rows: dict[Var, MarkedScan] = {}  # what the ranges of scans with marks scan over
    for eqn in body.eqns:
        scan = next((rows[var] for var in operands(eqn) if var in rows), None)
        if eqn.primitive is layers_p and eqn.params["scan"]:
            rows[eqn.outvars[0]] = eqn.params["scan"]
        elif eqn.primitive.name == "split" and scan:
            rows.update(dict.fromkeys(eqn.outvars, scan))
        elif eqn.primitive.name == "scan" and scan and _is_over_data(eqn, of_microbatch):
            yield _message(scan.mark, where(eqn))


def _message(mark: str, scan: str) -> str:
    return (
        f"mark_stage_end at {mark} is in a scan over data, such as time or rows, at {scan}: its iterations "
        "become stages that all read the same weights, so each group holds all of them. Mark the ends of "
        "stages between layers: around such scans, rather than in them, or in a scan over the stacked "
        "weights of layers"
    )


def _is_over_data(eqn: JaxprEqn, of_microbatch: Collection[Var]) -> bool:
    """Whether iterations read weights, and the arrays that they scan over are only data of the microbatch.

    A number or a random key of each iteration is neither data nor a weight.
    """
    scan = Scan.of(eqn)
    xs, shared = eqn.invars[scan.xs], eqn.invars[scan.consts]
    data = [atom for atom in xs if is_among(atom, of_microbatch)]
    has_data = any(len(shape_of(atom)) > 1 and not _is_of_keys(atom) for atom in data)
    others = [atom for atom in xs if not is_among(atom, of_microbatch)]
    has_layers = any(len(shape_of(atom)) > 1 or is_inexact(atom) for atom in others)
    weights = (atom for atom in shared if len(shape_of(atom)) > 1 and is_inexact(atom))
    return has_data and not has_layers and any(not is_among(atom, of_microbatch) for atom in weights)


def _is_of_keys(atom: Atom) -> bool:
    return any(
        jax.dtypes.issubdtype(aval_of(atom).dtype, kind)
        for kind in (jax.dtypes.prng_key, jnp.unsignedinteger)
    )
