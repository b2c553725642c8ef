"""Keeps the discrete choices of rematerialised functions, so that a backward has the choices of its forward.

Under ``jax.checkpoint`` a backward computes ``top_k``, ``argmax``, sort orders and predicates again, in
another executable than the forward's. XLA may round their floating-point operands in another way there, and a
token would have its gradient from another expert than it went through. So binding a rematerialised function
in the function of a loop names its choices, and its policy keeps them by their name, besides what the user's
policy keeps.

A choice is an integer or boolean that an equation makes of floating-point values, and that is the result of
``top_k``, ``argmax`` or a sort, or that later equations read as an index, a sort key or a predicate. Values
that follow from integers alone, such as the order of tokens by their experts, are exact, and computed again.
So are masks of elementwise operations, such as ReLU and dropout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var
from jax.extend.core.primitives import name_p, remat_p

from mpmd.compat import replace_calls
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    is_among,
    is_dropped,
    is_inexact,
    is_remat,
    lookup,
    makers_of,
    needed_eqns,
    operands,
    subjaxprs,
    substitute,
    variables,
    with_eqns,
    with_params,
)
from mpmd.compiler.jaxprs.inline import Inliner
from mpmd.compiler.jaxprs.marks import marks_in
from mpmd.compiler.jaxprs.work import nbytes
from mpmd.language.choices import are_choices_kept
from mpmd.language.decisions import slices_of_loop
from mpmd.language.kernels import Kernel

KEPT, RECOMPUTED = "kept choice", "recomputed choice"
"""The names of choices in rematerialised functions, as of ``jax.ad_checkpoint.checkpoint_name``."""

MOST = 0.01
"""The largest share of the bytes of a function's activations that its choices have if they are kept."""

_CHOOSING = frozenset("approx_top_k argmax argmin sort top_k".split())
"""The primitives whose integer results are choices, whoever reads them."""

_WITH_BODIES = frozenset("cond jit scan shard_map".split())

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
    "scatter-sub": 1,
    "sort": 0,
}
"""For primitives that read indices, sort keys or predicates: the position of the first."""


def choices_in(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Returns the choices among the variables that equations define, but for choices that have a name."""
    indices: set[Var] = set()
    choices: set[Var] = set()
    for eqn in reversed(eqns):
        name = eqn.primitive.name
        made = [var for var in eqn.outvars if not (is_inexact(var) or is_dropped(var))]
        chosen = made if name in _CHOOSING else [var for var in made if var in indices]
        read: Sequence[Atom] = eqn.invars[_FIRST_INDEX[name] :] if name in _FIRST_INDEX else ()
        if any(map(is_inexact, eqn.invars)):
            choices.update(chosen)
        elif chosen and eqn.primitive is not name_p:
            read = eqn.invars
        indices.update(atom for atom in read if isinstance(atom, Var) and not is_inexact(atom))
    return choices - {var for eqn in eqns if choice_name(eqn) for var in operands(eqn)}


def choice_name(eqn: JaxprEqn) -> str | None:
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
        if primitive is name_p and params["name"] in (KEPT, RECOMPUTED):
            return self.keeps_choices and params["name"] == KEPT
        return self.user is not None and self.user(primitive, *avals, **params)


def keep_choices(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any] | None:
    """The results of a rematerialised function that keeps its choices; ``None`` if it has none to keep.

    A function is bound once more where it is differentiated, with choices that only the derivative makes,
    such as the sort order of a sort. A kernel keeps nothing.
    """
    policy, jaxpr = params["policy"], params["jaxpr"]
    if params["differentiated"] or not slices_of_loop() or isinstance(policy, Kernel):
        return None
    if not isinstance(policy, _Policy):
        policy = _Policy(policy, are_choices_kept())
    elif not policy.keeps_choices:
        return None
    if policy.keeps_choices:
        named = _named(jaxpr, KEPT)
        if not choice_bytes(named, KEPT, RECOMPUTED):
            return None
        is_too_large = choice_bytes(named, KEPT) > MOST * sum(map(nbytes, _activations(jaxpr)))
        jaxpr = _named(jaxpr, RECOMPUTED) if is_too_large else named
    return _bind_to_equation(*args, **{**params, "jaxpr": jaxpr, "policy": policy})


_bind_to_equation = replace_calls(remat_p, keep_choices)


def _named(jaxpr: Jaxpr, name: str) -> Jaxpr:
    """A function with a name for each of its choices, also in its bodies; ``RECOMPUTED`` choices stay so.

    Functions under ``jax.jit`` in it are inlined. All equations read a choice by its name, also equations of
    a derivative that were made before the name, as by the rule of ``top_k``. Without choices the function
    stays the same object.
    """
    opening = Inliner(_jitted)
    opened: dict[Var, Atom] = {}
    opening.add(jaxpr.eqns, opened)
    defined = makers_of(opening.eqns)
    names: dict[Var, str] = {}
    named: dict[Var, Atom] = {}
    unnamed: list[JaxprEqn] = []
    for eqn in opening.eqns:
        eqn = substitute(eqn, named)
        if (old := choice_name(eqn)) and is_among(eqn.invars[0], defined):
            named[eqn.outvars[0]] = eqn.invars[0]
            names[eqn.invars[0]] = old
        else:
            unnamed.append(eqn)
    if name == RECOMPUTED:
        names = dict.fromkeys(names, RECOMPUTED)
    names = dict.fromkeys(choices_in(unnamed), name) | names
    outvars = [lookup(lookup(atom, opened), named) for atom in jaxpr.outvars]
    read = set(variables(outvars)).union(*map(operands, needed_eqns(unnamed, outvars)))
    names = {var: text for var, text in names.items() if var in read}
    eqns: list[JaxprEqn] = []
    are_changed = bool(names)
    for eqn in unnamed:
        if _has_choices_inside(eqn):
            new = with_params(eqn, (Jaxpr,), lambda inner: _named(inner, name))
            are_changed |= new is not eqn
            eqn = new
        nameless = {var: Var(var.aval) for var in eqn.outvars if var in names}
        eqns.append(eqn.replace(outvars=[nameless.get(var, var) for var in eqn.outvars]))
        for var, new_var in nameless.items():
            naming = eqn.replace(primitive=name_p, params={"name": names[var]}, effects=frozenset())
            eqns.append(naming.replace(invars=[new_var], outvars=[var]))
    if not are_changed:
        return jaxpr
    return with_eqns(jaxpr, eqns, outvars=outvars)


def _has_choices_inside(eqn: JaxprEqn) -> bool:
    """Whether choices in an equation's bodies are named; rematerialised functions have decided it."""
    if is_remat(eqn):
        return isinstance(eqn.params["policy"], _Policy) and eqn.params["policy"].keeps_choices
    return eqn.primitive.name in _WITH_BODIES


def _jitted(eqn: JaxprEqn) -> ClosedJaxpr | None:
    return eqn.params["jaxpr"] if eqn.primitive.name == "jit" and not eqn.params["jaxpr"].consts else None


def _activations(jaxpr: Jaxpr) -> list[Atom]:
    """The arrays that a function hands on; its arguments, if it returns scalars, as a loss does."""
    marked = [var for eqn, _ in marks_in(jaxpr) for var in eqn.outvars]
    handed_on = [atom for atom in (*jaxpr.outvars, *marked) if is_inexact(atom)]
    has_arrays = any(aval_of(atom).shape for atom in handed_on)
    return handed_on if has_arrays else [*filter(is_inexact, jaxpr.invars)]


def choice_bytes(jaxpr: Jaxpr, *names: str) -> int:
    """The bytes of a function's choices that are named one of ``names``, in all iterations of its scans."""
    total = 0
    for eqn in jaxpr.eqns:
        total += nbytes(eqn.outvars[0]) if choice_name(eqn) in names else 0
        total += eqn.params.get("length", 1) * sum(choice_bytes(inner, *names) for inner in subjaxprs(eqn))
    return total
