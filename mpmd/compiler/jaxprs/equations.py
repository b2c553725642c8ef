"""Reads and builds equations: their operands, bodies, types and sizes, and jaxprs from equations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import remat_p

from mpmd.compat import NAMELESS
from mpmd.compiler.jaxprs.source import nearness_to_user

Atom = Var | Literal
Value = TypeVar("Value")


def subjaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    return list(core.jaxprs_in_params(eqn.params))


def all_eqns(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations, each before the equations in its bodies, at any depth."""
    for eqn in eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from all_eqns(inner.eqns)


def contains(jaxpr: Jaxpr, primitive: Primitive) -> bool:
    return any(eqn.primitive is primitive for eqn in all_eqns(jaxpr.eqns))


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]


def operands(eqn: JaxprEqn) -> Sequence[Var]:
    """The variables that an equation reads. This is called most, so most equations need no new list."""
    atoms: list[Any] = eqn.invars
    return variables(atoms) if Literal in map(type, atoms) else atoms


def is_dropped(var: Var) -> bool:
    """Whether the variable is a ``DropVar``: nothing reads it."""
    return type(var) is not Var


def substitute(eqn: JaxprEqn, replacement: Mapping[Var, Atom]) -> JaxprEqn:
    if replacement.keys().isdisjoint(operands(eqn)):
        return eqn
    return eqn.replace(invars=[lookup(atom, replacement) for atom in eqn.invars])


def lookup(atom: Atom, replacement: Mapping[Var, Atom]) -> Atom:
    return replacement.get(atom, atom) if isinstance(atom, Var) else atom


def entry_of(atom: Atom, values: Mapping[Var, Value]) -> Value | None:
    """The value of an atom; ``None`` for a literal, and for a variable without one."""
    return values.get(atom) if isinstance(atom, Var) else None


def is_among(atom: Atom, variables: Container[Var]) -> TypeGuard[Var]:
    """Whether an atom is a variable among ``variables``; literals have no hash to look up."""
    return isinstance(atom, Var) and atom in variables


def is_remat(eqn: JaxprEqn) -> bool:
    return eqn.primitive is remat_p


def as_called(call: JaxprEqn, eqn: JaxprEqn) -> JaxprEqn:
    """An equation that ``call`` calls, with the transformations of the call, such as ``transpose``.

    If only the call has a line of the user's own files, as where a library uses ``jit``, that is its line.
    """
    inner, outer = eqn.source_info, call.source_info
    traceback = inner.traceback if nearness_to_user(eqn) >= nearness_to_user(call) else outer.traceback
    source_info = inner.replace(traceback=traceback, name_stack=outer.name_stack + inner.name_stack)
    return eqn.replace(source_info=source_info)


def with_params(eqn: JaxprEqn, kinds: tuple[type, ...], change: Callable[[Any], Any]) -> JaxprEqn:
    """Applies ``change`` to every parameter of an equation that is of one of the ``kinds``, and to every such
    member of tuples and lists, and jaxpr of closed jaxprs, among its parameters.

    If ``change`` returns the same objects, so does this function.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, kinds):
            return change(value)
        if isinstance(value, core.ClosedJaxpr):
            inner = change(value.jaxpr)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        if type(value) in (tuple, list):
            members = [changed(member) for member in value]
            return value if are_same(members, value) else type(value)(members)
        return value

    params = {name: changed(value) for name, value in eqn.params.items()}
    return eqn if are_same([*params.values()], [*eqn.params.values()]) else eqn.replace(params=params)


def are_same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return len(new) == len(old) and all(map(operator.is_, new, old))


def with_eqns(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], **changes: Any) -> Jaxpr:
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(eqns=list(eqns), effects=effects, debug_info=NAMELESS, **changes)


def with_body(eqn: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    is_closed = isinstance(eqn.params["jaxpr"], core.ClosedJaxpr)
    return eqn.replace(params={**eqn.params, "jaxpr": closed(body) if is_closed else body})


def make_jaxpr(invars: Sequence[Var], eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]) -> Jaxpr:
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return Jaxpr([], list(invars), list(outvars), list(eqns), effects, NAMELESS)


def closed(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> core.ClosedJaxpr:
    """A jaxpr as a closed one, with the values of its constants. Since JAX 0.12 it is one already."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, consts)


def makers_of(eqns: Iterable[JaxprEqn]) -> dict[Var, JaxprEqn]:
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def free_variables(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations read and do not define, in the order of first use."""
    defined: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        for var in operands(eqn):
            if var not in defined:
                free[var] = None
        defined.update(eqn.outvars)
    return list(free)


def dependents(eqns: Iterable[JaxprEqn], sources: Iterable[Var]) -> set[Var]:
    reached = set(sources)
    for eqn in eqns:
        if not reached.isdisjoint(operands(eqn)):
            reached.update(eqn.outvars)
    return reached


def needed_eqns(
    eqns: Sequence[JaxprEqn],
    results: Iterable[Atom],
    given: Container[Var] = (),
) -> list[JaxprEqn]:
    """Returns the equations that compute ``results`` from ``given`` variables, and equations with effects.

    The backward slice of ``results``. Bodies of loops stay whole; ``live_eqns`` takes them apart, too.
    """
    needed = set(variables(results))
    slice_: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            slice_.append(eqn)
            needed.update(var for var in operands(eqn) if var not in given)
    return slice_[::-1]


def size(atom: Atom) -> int:
    return math.prod(shape_of(atom))


def shape_of(atom: Atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return aval.shape


def aval_of(atom: Atom) -> Any:
    return atom.aval


def avals_of(atoms: Sequence[Atom]) -> list[Any]:
    return [aval_of(atom) for atom in atoms]


def is_inexact(atom: Atom) -> bool:
    """Whether a value has floating-point or complex numbers; random keys are integers."""
    return jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def is_index(atom: Atom) -> bool:
    return shape_of(atom) == () and jnp.issubdtype(aval_of(atom).dtype, jnp.integer)
