"""Finds the callbacks into Python that return no value, for the driver to call.

Such a callback may stand in scans, conditionals and rematerialized functions of the loop's body. The
callback's operands then become results of the surrounding equation: a scan stacks them, and a conditional
adds a flag that tells whether the callback was called. A callback within another kind of equation, such as a
``while_loop`` or a ``shard_map``, stays part of the executable, and so does a callback whose results are
read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import remat_p, scan_p

from mpmd.compiler.jaxprs.equations import (
    Atom,
    all_eqns,
    aval_of,
    avals_of,
    closed,
    make_jaxpr,
    operands,
    variables,
    with_eqns,
)
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.keys import decode, raw
from mpmd.language.callbacks import GIVING_NOTHING_BACK, HostCallback, Iterations, callback_p
from mpmd.language.reduce import treduce_p

Position = tuple[int | None, ...]


def with_host_callbacks(jaxpr: Jaxpr) -> Jaxpr:
    return with_eqns(jaxpr, _lifted(jaxpr, ())) if any(eqn.effects for eqn in jaxpr.eqns) else jaxpr


def _has_callback_inside(eqn: JaxprEqn) -> bool:
    return bool(eqn.effects) and any(
        one.primitive.name in GIVING_NOTHING_BACK for one in all_eqns([eqn]) if one is not eqn
    )


def _lifted(jaxpr: Jaxpr, path: Position) -> list[JaxprEqn]:
    """The equations of a jaxpr; behind each are the callbacks in its bodies, as ``callback_p`` equations."""
    read = set(variables(jaxpr.outvars)).union(*map(operands, jaxpr.eqns))
    eqns: list[JaxprEqn] = []
    for number, eqn in enumerate(jaxpr.eqns):
        at = (*path, number)
        if eqn.primitive.name in GIVING_NOTHING_BACK and read.isdisjoint(eqn.outvars):
            eqns.append(_host_callback(eqn, at))
        elif (lift := _LIFTS.get(eqn.primitive.name)) and _has_callback_inside(eqn):
            eqns += lift(eqn, at)
        else:
            eqns.append(eqn)
    return eqns


def _host_callback(eqn: JaxprEqn, position: Position) -> JaxprEqn:
    callback = HostCallback(
        primitive=eqn.primitive,
        params=eqn.params,
        where=where(eqn),
        position=position,
        scans=(),
        conditional=False,
        avals=tuple(avals_of(eqn.invars)),
        literals={i: np.asarray(atom.val) for i, atom in enumerate(eqn.invars) if isinstance(atom, Literal)},
    )
    params = {"callback": callback}
    return eqn.replace(primitive=callback_p, params=params, invars=[*operands(eqn)], outvars=[])


def _opened(body: Jaxpr, path: Position) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    eqns = _lifted(body, path)
    callbacks = [eqn for eqn in eqns if eqn.primitive is callback_p]
    return [eqn for eqn in eqns if eqn.primitive is not callback_p], callbacks


def _read_by(callbacks: Iterable[JaxprEqn]) -> list[Var]:
    return [var for eqn in callbacks for var in operands(eqn)]


def _reading(callbacks: Iterable[JaxprEqn], atoms: Iterable[Atom]) -> list[JaxprEqn]:
    """Replaces the callbacks' operands by ``atoms``, which has the operands of one callback after another."""
    rest = iter(atoms)
    return [eqn.replace(invars=[next(rest) for _ in eqn.invars]) for eqn in callbacks]


def _changed(eqn: JaxprEqn, **changes: Any) -> JaxprEqn:
    return eqn.replace(params={"callback": dataclasses.replace(eqn.params["callback"], **changes)})


def _lift_in_loop(eqn: JaxprEqn, at: Position) -> list[JaxprEqn]:
    """The driver calls the callbacks of a microbatch loop for each microbatch: they stay in its body."""
    body = with_eqns(eqn.params["body"], _lifted(eqn.params["body"], (*at, None)))
    return [eqn.replace(params={**eqn.params, "body": body})]


def _lift_from_scan(eqn: JaxprEqn, at: Position) -> list[JaxprEqn]:
    whole: ClosedJaxpr = eqn.params["jaxpr"]
    eqns, callbacks = _opened(whole.jaxpr, (*at, None))
    if not callbacks:
        return [eqn]
    results = set(range(len(whole.jaxpr.outvars)))
    scan, stacks = Scan.of(eqn).part(eqns, results, extra_outputs=_read_by(callbacks))
    around = Iterations(eqn.params["length"], eqn.params["reverse"])
    callbacks = [_changed(each, scans=(around, *each.params["callback"].scans)) for each in callbacks]
    return [scan, *_reading(callbacks, stacks)]


def _lift_from_remat(eqn: JaxprEqn, at: Position) -> list[JaxprEqn]:
    body: Jaxpr = eqn.params["jaxpr"]
    eqns, callbacks = _opened(body, at)
    smaller = make_jaxpr(body.invars, eqns, [*body.outvars, *_read_by(callbacks)])
    return _with_bodies(eqn, {"jaxpr": smaller}, smaller.effects, callbacks)


def _lift_from_conditional(eqn: JaxprEqn, at: Position) -> list[JaxprEqn]:
    """Branches return the operands of the callbacks of all branches: zeros, and a flag that is false, for
    the callbacks of other branches."""
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    opened = [_opened_branch(branch.jaxpr, (*at, i)) for i, branch in enumerate(branches)]
    smaller = []
    for i, branch in enumerate(branches):
        eqns, results = list(opened[i][0]), list(branch.jaxpr.outvars)
        for other, (_, callbacks) in enumerate(opened):
            atoms: list[Atom] = [*_read_by(callbacks)]
            if other != i:
                zeros, atoms = _zeros(_read_by(callbacks))
                eqns += zeros
            results += atoms
        smaller.append(closed(make_jaxpr(branch.jaxpr.invars, eqns, results)))
    effects = frozenset().union(*(branch.jaxpr.effects for branch in smaller))
    every_callback = [each for _, callbacks in opened for each in callbacks]
    return _with_bodies(eqn, {"branches": tuple(smaller)}, effects, every_callback)


def _with_bodies(
    eqn: JaxprEqn, bodies: dict[str, Any], effects: Any, callbacks: Sequence[JaxprEqn]
) -> list[JaxprEqn]:
    returned = [Var(aval_of(var)) for var in _read_by(callbacks)]
    params, outvars = {**eqn.params, **bodies}, [*eqn.outvars, *returned]
    return [eqn.replace(params=params, outvars=outvars, effects=effects), *_reading(callbacks, returned)]


def _opened_branch(jaxpr: Jaxpr, path: Position) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """As ``_opened``. Each callback has a flag as its first operand, which is true where it stands."""
    eqns, callbacks = _opened(jaxpr, path)
    flagged: list[JaxprEqn] = []
    for each in callbacks:
        if not each.params["callback"].conditional:
            ones, flags = _ones(each.params["callback"].scans)
            eqns += ones
            each = _changed(each, conditional=True).replace(invars=[*flags, *each.invars])
        flagged.append(each)
    return eqns, flagged


def _ones(scans: Sequence[Iterations]) -> tuple[list[JaxprEqn], list[Any]]:
    """Flags as variables: a literal would be true in the other branches, too."""
    return traced_eqns(lambda: [jnp.copy(jnp.ones([scan.length for scan in scans], bool))], [])


def _zeros(atoms: Sequence[Var]) -> tuple[list[JaxprEqn], list[Any]]:
    avals = avals_of(atoms)

    def zeros():
        return [decode(jnp.zeros(raw(aval).shape, raw(aval).dtype), aval) for aval in avals]

    return traced_eqns(zeros, [])


_LIFTS: dict[str, Callable[[JaxprEqn, Position], list[JaxprEqn]]] = {
    scan_p.name: _lift_from_scan,
    "cond": _lift_from_conditional,
    remat_p.name: _lift_from_remat,
    treduce_p.name: _lift_in_loop,
}
