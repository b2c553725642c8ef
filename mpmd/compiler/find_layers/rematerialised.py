"""A function under ``jax.checkpoint``, by the policies of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from mpmd.compiler.find_layers.open_function import open_function
from mpmd.compiler.jaxprs.equations import closed, free_variables, is_remat, make_jaxpr, operands
from mpmd.compiler.jaxprs.find_attention import attentions
from mpmd.language.remat import Remat

Function = Callable[..., list[Any]]

SAVEABLE = {
    Remat.DOTS_SAVEABLE: jax.checkpoint_policies.dots_saveable,
    Remat.DOTS_WITH_NO_BATCH_DIMS_SAVEABLE: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    Remat.NOTHING_SAVEABLE: None,
}
"""The ``policy=`` of ``jax.checkpoint`` around a whole layer."""


def rematerialised(function: ClosedJaxpr, policy: Remat, prevent_cse: bool = True) -> Function:
    """A function of which the backward computes again what a policy does not keep."""
    if policy is Remat.ATTENTION:
        return _with_attention_again(function, prevent_cse)
    if policy is Remat.NONE:
        return jaxpr_as_fun(function)
    return jax.checkpoint(jaxpr_as_fun(function), policy=SAVEABLE[policy], prevent_cse=prevent_cse)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive equations of a function, and whether their inside is computed again."""

    eqns: Sequence[JaxprEqn]
    again: bool = False


def _with_attention_again(function: ClosedJaxpr, prevent_cse: bool) -> Function:
    """The function with each attention under ``jax.checkpoint``."""
    opened = open_function(function, lambda eqn: not is_remat(eqn))
    pieces = _pieces(opened.jaxpr.eqns)
    if not any(piece.again for piece in pieces):
        return jaxpr_as_fun(function)

    def with_pieces(*arguments: Any) -> list[Any]:
        values = dict(opened.constants)
        values.update(zip(opened.jaxpr.invars, arguments, strict=True))
        for i, piece in enumerate(pieces):
            later = (eqn for other in pieces[i + 1 :] for eqn in other.eqns)
            read_later = {*free_variables(later), *_variables(opened.jaxpr.outvars)}
            results = [var for eqn in piece.eqns for var in eqn.outvars if var in read_later]
            read = free_variables(piece.eqns)
            run = jaxpr_as_fun(closed(make_jaxpr(read, piece.eqns, results)))
            if piece.again:
                run = jax.checkpoint(run, prevent_cse=prevent_cse)
            values.update(zip(results, run(*(values[var] for var in read)), strict=True))
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in opened.jaxpr.outvars]

    return with_pieces


def _variables(atoms: Sequence[Any]) -> Iterator[Var]:
    return (atom for atom in atoms if isinstance(atom, Var))


def _pieces(eqns: Sequence[JaxprEqn]) -> list[_Piece]:
    """The equations, with those of each attention behind one another."""
    pieces: list[_Piece] = []
    rest = list(eqns)
    for members in attentions([(eqn, operands(eqn), eqn.outvars) for eqn in eqns]):
        inside = [eqns[i] for i in members]
        if (parts := _parted(rest, inside)) is not None:
            before, rest = parts
            pieces += [_Piece(before), _Piece(inside, again=True)]
    return [piece for piece in (*pieces, _Piece(rest)) if piece.eqns]


def _parted(
    eqns: Sequence[JaxprEqn], inside: Sequence[JaxprEqn]
) -> tuple[list[JaxprEqn], list[JaxprEqn]] | None:
    """The equations before some that are put together, and those behind them.

    ``None`` where one of these needs another by way of equations that are not among them.
    """
    ids = {id(eqn) for eqn in inside}
    if not ids.issubset(map(id, eqns)):
        return None
    last = max(i for i, eqn in enumerate(eqns) if id(eqn) in ids)
    before: list[JaxprEqn] = []
    behind: list[JaxprEqn] = []
    made_inside: set[Var] = set()
    made_behind: set[Var] = set()
    for eqn in eqns[: last + 1]:
        read = operands(eqn)
        if id(eqn) in ids:
            if not made_behind.isdisjoint(read):
                return None
            made_inside.update(eqn.outvars)
        elif made_inside.isdisjoint(read) and made_behind.isdisjoint(read):
            before.append(eqn)
        else:
            behind.append(eqn)
            made_behind.update(eqn.outvars)
    return before, [*behind, *eqns[last + 1 :]]
