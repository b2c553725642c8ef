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
    aval_of,
    avals_of,
    closed,
    lookup,
    make_jaxpr,
    operands,
    subjaxprs,
    substitute,
    with_eqns,
)
from mpmd.compiler.jaxprs.scan_parts import part_of_scan
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.keys import decode, raw
from mpmd.language.callbacks import GIVING_NOTHING_BACK, HostCallback, Iterations, callback_p
from mpmd.language.reduce import treduce_p


def with_host_callbacks(jaxpr: Jaxpr) -> Jaxpr:
    """The step with a ``callback_p`` equation for each callback that gives nothing back."""
    return _rewritten(jaxpr, ()) if any(eqn.effects for eqn in jaxpr.eqns) else jaxpr


def has_callback(eqn: JaxprEqn) -> bool:
    """Whether a callback that may give nothing back is inside what the equation calls."""
    return bool(eqn.effects) and any(
        inner.primitive.name in GIVING_NOTHING_BACK or has_callback(inner)
        for jaxpr in subjaxprs(eqn)
        for inner in jaxpr.eqns
    )


@dataclasses.dataclass(frozen=True)
class _Lifted:
    """A callback that was taken out of equations, with its operands where it is now, or literals."""

    eqn: JaxprEqn
    position: tuple[int | None, ...]
    operands: tuple[Atom, ...]
    scans: tuple[Iterations, ...] = ()
    conditional: bool = False


def _rewritten(jaxpr: Jaxpr, path: tuple[int | None, ...]) -> Jaxpr:
    eqns: list[JaxprEqn] = []
    items, outvars = _without_callbacks(jaxpr, path)
    # A loop has the number of its equation, as the first part of the positions in it.
    numbers = (i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is treduce_p)
    for item in items:
        if isinstance(item, _Lifted):
            eqns.append(_carried_out_by_driver(item))
        elif item.primitive is treduce_p:
            number = next(numbers)
            body = _rewritten(item.params["body"], (*path, number, None))
            eqns.append(item.replace(params={**item.params, "body": body}))
        else:
            eqns.append(item)
    return with_eqns(jaxpr, eqns, outvars=outvars)


def _carried_out_by_driver(lifted: _Lifted) -> JaxprEqn:
    called = lifted.eqn
    flags = 1 if lifted.conditional else 0
    callback = HostCallback(
        primitive=called.primitive,
        params=called.params,
        where=where(called),
        position=lifted.position,
        scans=lifted.scans,
        conditional=lifted.conditional,
        avals=tuple(avals_of(called.invars)),
        literals={
            i: np.asarray(atom.val)
            for i, atom in enumerate(lifted.operands[flags:])
            if isinstance(atom, Literal)
        },
    )
    return called.replace(
        primitive=callback_p,
        params={"callback": callback},
        invars=[*_variables_of([lifted])],
        outvars=[],
    )


def _without_callbacks(
    jaxpr: Jaxpr, path: tuple[int | None, ...]
) -> tuple[list[JaxprEqn | _Lifted], list[Atom]]:
    """The equations of a jaxpr with its callbacks lifted, in order, and its results."""
    items: list[JaxprEqn | _Lifted] = []
    renamed: dict[Var, Atom] = {}
    read = {var for eqn in jaxpr.eqns for var in operands(eqn)}
    read |= {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    for number, eqn in enumerate(jaxpr.eqns):
        eqn, at = substitute(eqn, renamed), (*path, number)
        if eqn.primitive.name in GIVING_NOTHING_BACK and read.isdisjoint(eqn.outvars):
            items.append(_Lifted(eqn, at, tuple(eqn.invars)))
        elif (lift := _LIFTS.get(eqn.primitive.name)) and has_callback(eqn):
            items += lift(eqn, at, renamed)
        else:
            items.append(eqn)
    return items, [lookup(atom, renamed) for atom in jaxpr.outvars]


def _opened(jaxpr: Jaxpr, path: tuple[int | None, ...]) -> tuple[list[JaxprEqn], list[Atom], list[_Lifted]]:
    """The equations of a body, its results, and the callbacks that were among the equations."""
    items, outvars = _without_callbacks(jaxpr, path)
    eqns = [item for item in items if isinstance(item, JaxprEqn)]
    return eqns, outvars, [item for item in items if isinstance(item, _Lifted)]


def _variables_of(lifted: Iterable[_Lifted]) -> list[Var]:
    return [atom for member in lifted for atom in member.operands if isinstance(atom, Var)]


def _outside(lifted: Sequence[_Lifted], atoms: Sequence[Atom]) -> list[_Lifted]:
    """The callbacks with what their variables, one after the other, are outside of an equation."""
    rest = iter(atoms)
    return [
        dataclasses.replace(
            member,
            operands=tuple(next(rest) if isinstance(atom, Var) else atom for atom in member.operands),
        )
        for member in lifted
    ]


def _lift_from_scan(
    eqn: JaxprEqn, at: tuple[int | None, ...], renamed: dict[Var, Atom]
) -> list[JaxprEqn | _Lifted]:
    whole: ClosedJaxpr = eqn.params["jaxpr"]
    eqns, outvars, lifted = _opened(whole.jaxpr, (*at, None))
    if not lifted:
        return [eqn]
    smaller = closed(with_eqns(whole.jaxpr, eqns, outvars=outvars))
    scan = Scan.of(eqn.replace(params={**eqn.params, "jaxpr": smaller}))
    scans, stacks = part_of_scan(scan, eqns, set(range(len(outvars))), extra_outputs=_variables_of(lifted))
    around = Iterations(scan.length, eqn.params["reverse"])
    lifted = [dataclasses.replace(member, scans=(around, *member.scans)) for member in lifted]
    return [*scans, *_outside(lifted, stacks)]


def _lift_from_remat(
    eqn: JaxprEqn, at: tuple[int | None, ...], renamed: dict[Var, Atom]
) -> list[JaxprEqn | _Lifted]:
    body: Jaxpr = eqn.params["jaxpr"]
    eqns, outvars, lifted = _opened(body, at)
    results = [*outvars, *_variables_of(lifted)]
    smaller = make_jaxpr(body.invars, eqns, results)
    operands_outside = [Var(aval_of(atom)) for atom in results[len(outvars) :]]
    params = {**eqn.params, "jaxpr": smaller}
    return [
        eqn.replace(params=params, outvars=[*eqn.outvars, *operands_outside], effects=smaller.effects),
        *_outside(lifted, operands_outside),
    ]


def _lift_from_conditional(
    eqn: JaxprEqn, at: tuple[int | None, ...], renamed: dict[Var, Atom]
) -> list[JaxprEqn | _Lifted]:
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    opened = [_opened_branch(branch.jaxpr, (*at, i)) for i, branch in enumerate(branches)]
    operands_outside = [Var(aval_of(atom)) for _, _, lifted in opened for atom in _variables_of(lifted)]
    smaller = []
    for i, branch in enumerate(branches):
        eqns, outvars, _ = opened[i]
        results = list(outvars)
        for other, (_, _, lifted) in enumerate(opened):
            atoms: list[Atom] = [*_variables_of(lifted)]
            if other != i:  # nothing is called, as the flags among the zeros say
                zeros, atoms = _zeros(_variables_of(lifted))
                eqns = [*eqns, *zeros]
            results += atoms
        smaller.append(closed(make_jaxpr(branch.jaxpr.invars, eqns, results)))
    effects = frozenset().union(*(branch.jaxpr.effects for branch in smaller))
    params = {**eqn.params, "branches": tuple(smaller)}
    return [
        eqn.replace(params=params, outvars=[*eqn.outvars, *operands_outside], effects=effects),
        *_outside([member for _, _, lifted in opened for member in lifted], operands_outside),
    ]


def _opened_branch(
    jaxpr: Jaxpr, path: tuple[int | None, ...]
) -> tuple[list[JaxprEqn], list[Atom], list[_Lifted]]:
    """As ``_opened``. Each callback has a flag as its first operand, which is true where it stands."""
    eqns, outvars, lifted = _opened(jaxpr, path)
    flagged: list[_Lifted] = []
    for member in lifted:
        if not member.conditional:
            ones, flags = _ones(member.scans)
            eqns += ones
            member = dataclasses.replace(member, operands=(*flags, *member.operands), conditional=True)
        flagged.append(member)
    return eqns, outvars, flagged


def _ones(scans: Sequence[Iterations]) -> tuple[list[JaxprEqn], list[Any]]:
    """Flags as variables: a literal would be true in the other branches, too."""
    return traced_eqns(lambda: [jnp.copy(jnp.ones([scan.length for scan in scans], bool))], [])


def _zeros(atoms: Sequence[Var]) -> tuple[list[JaxprEqn], list[Any]]:
    avals = avals_of(atoms)

    def zeros():
        return [decode(jnp.zeros(raw(aval).shape, raw(aval).dtype), aval) for aval in avals]

    return traced_eqns(zeros, [])


_LIFTS: dict[str, Callable[..., list[JaxprEqn | _Lifted]]] = {
    scan_p.name: _lift_from_scan,
    "cond": _lift_from_conditional,
    remat_p.name: _lift_from_remat,
}
