"""Keeps the discrete choices of rematerialised functions, so that a backward makes no others.

Under ``jax.checkpoint`` a backward computes ``top_k``, ``argmax``, sort orders and predicates again, in
another executable than the forward's. XLA may round their floating-point operands in another way there, and a
token would have its gradient from another expert than it went through. So binding a rematerialised function
in the function of a loop names its choices, and its policy keeps them by their name, besides what the user's
policy keeps.

A choice is an integer or boolean that an equation makes of floating-point values, and that is the result of
``top_k``, ``argmax`` or a sort, or that later equations read as an index, a sort key or a predicate. Values
that follow from integers alone, such as the order of tokens by their experts, are exact, and computed again.
So are masks of elementwise operations, such as those of ReLU and dropout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var
from jax.extend.core.primitives import name_p, remat_p

from mpmd.compat import replace_calls
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    closed,
    is_dropped,
    lookup,
    operands,
    subjaxprs,
    with_eqns,
)
from mpmd.compiler.jaxprs.inline import Inliner
from mpmd.compiler.jaxprs.marks import marks_in
from mpmd.compiler.jaxprs.work import nbytes
from mpmd.language.choices import are_choices_kept
from mpmd.language.decisions import slices_of_loop

KEPT, RECOMPUTED = "kept choice", "recomputed choice"
"""The names of choices in rematerialised functions, as of ``jax.ad_checkpoint.checkpoint_name``."""

MOST = 0.01
"""The largest share of the bytes of a function's activations that its choices have if they are kept."""

_CHOOSING = frozenset("approx_top_k argmax argmin sort top_k".split())
"""The primitives whose integer results are choices, whoever reads them."""

_WITH_BODIES = frozenset("cond scan shard_map".split())

_FIRST_INDEX = {
    "cond": 0,
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
    "gather": 1,
    "ragged_dot_general": 2,
    "scatter": 1,
    "scatter-add": 1,
    "scatter-max": 1,
    "scatter-min": 1,
    "scatter-mul": 1,
    "sort": 0,
}
"""For primitives that read indices, sort keys or predicates: the position of the first."""


def choices_in(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Returns the choices among the variables that equations define, but for choices that have a name."""
    indices: set[Var] = set()
    choices: set[Var] = set()
    for eqn in reversed(eqns):
        name = eqn.primitive.name
        made = [var for var in eqn.outvars if _is_discrete(var) and not is_dropped(var)]
        chosen = made if name in _CHOOSING else [var for var in made if var in indices]
        read: Sequence[Atom] = eqn.invars[_FIRST_INDEX[name] :] if name in _FIRST_INDEX else ()
        if not all(map(_is_discrete, eqn.invars)):
            choices.update(chosen)
        elif chosen and eqn.primitive is not name_p:
            read = eqn.invars
        indices.update(atom for atom in read if isinstance(atom, Var) and _is_discrete(atom))
    return choices - {var for eqn in eqns if choice_name(eqn) for var in operands(eqn)}


def choice_name(eqn: JaxprEqn) -> str | None:
    """``KEPT`` or ``RECOMPUTED``, if the equation gives this name to a choice."""
    name = eqn.params["name"] if eqn.primitive is name_p else None
    return name if name in (KEPT, RECOMPUTED) else None


@dataclasses.dataclass(frozen=True)
class _Policy:
    """A policy of rematerialisation that keeps what the user's policy keeps, and the choices named ``KEPT``.

    Attributes:
      keeps_choices: ``False``: the user's policy alone, also where the function is differentiated.
    """

    user: Callable[..., Any] | None
    keeps_choices: bool

    def __call__(self, primitive: Primitive, *avals: Any, **params: Any) -> Any:
        if self.keeps_choices and primitive is name_p and params["name"] == KEPT:
            return True
        return self.user is not None and self.user(primitive, *avals, **params)


def keep_choices(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any] | None:
    """The results of a rematerialised function that keeps its choices; ``None`` if it has none to keep.

    A function is bound once more where it is differentiated, with choices that only the derivative makes,
    such as the sort order of a sort.
    """
    policy, jaxpr = params["policy"], params["jaxpr"]
    is_own = isinstance(policy, _Policy)
    if params["differentiated"] or not slices_of_loop() or (is_own and not policy.keeps_choices):
        return None
    user = policy.user if is_own else policy
    if not are_choices_kept():
        return remat_p.bind(*args, **{**params, "policy": _Policy(user, keeps_choices=False)})
    named = _named(jaxpr, KEPT)
    choices = choice_bytes(named, KEPT)
    if choices == choice_bytes(jaxpr, KEPT):
        return None
    if choices > MOST * sum(map(nbytes, _activations(jaxpr))):
        return remat_p.bind(*args, **{**params, "jaxpr": _named(jaxpr, RECOMPUTED)})
    return remat_p.bind(*args, **{**params, "jaxpr": named, "policy": _Policy(user, keeps_choices=True)})


replace_calls(remat_p, keep_choices)


def _named(jaxpr: Jaxpr, name: str) -> Jaxpr:
    """A function with names for its choices, and with the functions under ``jax.jit`` in it inlined."""
    opening = _ChoiceOpening()
    renamed: dict[Var, Atom] = {}
    opening.add(jaxpr.eqns, renamed)
    choices = choices_in(opening.eqns)
    eqns = []
    for eqn in opening.eqns:
        if eqn.primitive.name in _WITH_BODIES:
            eqn = eqn.replace(params={key: _with_named(value, name) for key, value in eqn.params.items()})
        unnamed = {var: Var(var.aval) for var in eqn.outvars if var in choices}
        eqns.append(eqn.replace(outvars=[unnamed.get(var, var) for var in eqn.outvars]))
        for var, new in unnamed.items():
            named = eqn.replace(primitive=name_p, params={"name": name}, effects=frozenset())
            eqns.append(named.replace(invars=[new], outvars=[var]))
    return with_eqns(jaxpr, eqns, outvars=[lookup(atom, renamed) for atom in jaxpr.outvars])


def _with_named(param: Any, name: str) -> Any:
    """A parameter of an equation with bodies, with names for the choices in it."""
    if isinstance(param, ClosedJaxpr):
        return closed(_named(param.jaxpr, name), param.consts)
    if isinstance(param, Jaxpr):
        return _named(param, name)
    return tuple(_with_named(each, name) for each in param) if isinstance(param, tuple) else param


class _ChoiceOpening(Inliner):
    def callee(self, eqn: JaxprEqn) -> ClosedJaxpr | None:
        return eqn.params["jaxpr"] if eqn.primitive.name == "jit" and not eqn.params["jaxpr"].consts else None


def _activations(jaxpr: Jaxpr) -> list[Atom]:
    """The arrays that a function hands on; those that it takes, if it returns scalars, as a loss does."""
    marked = [var for eqn, _ in marks_in(jaxpr) for var in eqn.outvars]
    handed_on = [atom for atom in (*jaxpr.outvars, *marked) if not _is_discrete(atom)]
    has_arrays = any(aval_of(atom).shape for atom in handed_on)
    return handed_on if has_arrays else [var for var in jaxpr.invars if not _is_discrete(var)]


def choice_bytes(jaxpr: Jaxpr, *names: str) -> int:
    """The bytes of the choices with one of these names in a function, of all iterations of its scans."""
    total = 0
    for eqn in jaxpr.eqns:
        total += nbytes(eqn.outvars[0]) if choice_name(eqn) in names else 0
        total += eqn.params.get("length", 1) * sum(choice_bytes(inner, *names) for inner in subjaxprs(eqn))
    return total


def _is_discrete(atom: Atom) -> bool:
    """Whether a value has integers or booleans, or random keys, which are integers, too."""
    return not jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)
