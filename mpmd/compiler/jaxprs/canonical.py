"""The canonical form of a step's equations, which ``trace`` makes once and every pass keeps.

- No equation is a mere call. The equations of functions under ``jit`` and of functions with derivatives of
  their own stand in place of the calls: a step is differentiated by the time that it is traced. So do the
    equations of functions that solve a linear system. A rematerialised function stays, because XLA must not
    merge its values with equal ones.
- No body closes over arrays. They are operands of the equation, and constants of the step.
- The bodies of microbatch loops and the branches of conditionals have variables of their own.
- No product is made only to be transposed, where the product with its operands exchanged is the result.

Bodies belong to ``scan``, ``while``, ``cond``, microbatch loops and rematerialised functions, at any depth.
The jaxprs in other equations, such as a ``shard_map`` or a reduction with a function, stay as JAX made them:
no pass reads them. A pass has JAX trace new equations by ``traced_eqns``, which returns canonical equations,
too.

A new primitive that only calls a jaxpr is a row of ``_CALLS``; one with a body that passes read is a row of
``_BODIES``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding

from mpmd.compat import expanded, scan_counts, with_scan_counts
from mpmd.compiler.jaxprs.equations import Atom, are_same, aval_of, avals_of, closed, lookup, with_eqns
from mpmd.compiler.jaxprs.inline import Constants, Inliner
from mpmd.compiler.jaxprs.transposed_products import without_transposed_products
from mpmd.sharding import with_auto_axes, within

_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "treduce": ("body",),
}

_WITH_OWN_VARIABLES = ("cond", "treduce")


def canonical(function: ClosedJaxpr) -> tuple[Jaxpr, Constants]:
    """The canonical form of a function.

    How calls outside of bodies say that operands and results are sharded is left to the step's own specs;
    in bodies it becomes sharding constraints.

    Returns: the jaxpr, whose first inputs are the constants that the function, and calls and bodies in it,
      close over, and the values of the constants.
    """
    return _canonical_form(function, _Scope({}, is_body=False))


def canonical_faults(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    """Yields a text for each equation that is not in canonical form. Skips the variables of bodies."""
    return _faults(eqns, set())


def _faults(eqns: Iterable[JaxprEqn], seen: set[int]) -> Iterator[str]:
    for eqn in eqns:
        if eqn.primitive.name in _CALLS:
            yield f"{eqn.primitive} is a call"
        for body in _bodies_of(eqn) if eqn.primitive.name in _BODIES else ():
            if body.consts:
                yield f"a body of {eqn.primitive} closes over arrays"
            if id(body.jaxpr) not in seen:
                seen.add(id(body.jaxpr))
                yield from _faults(body.jaxpr.eqns, seen)


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function of an equation that does nothing but call it, such as one under ``jit``."""
    callee = _CALLS.get(eqn.primitive.name)
    return callee(eqn) if callee else None


def _parameter(eqn: JaxprEqn) -> ClosedJaxpr:
    return next(value for value in eqn.params.values() if isinstance(value, ClosedJaxpr))


def _solution(eqn: JaxprEqn) -> ClosedJaxpr:
    """The solution of a ``custom_linear_solve``, as of ``jnp.linalg.solve``, as a jaxpr of all operands.

    The equation's other functions are for derivatives.
    """
    lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    start = lengths.matvec + lengths.vecmat
    stop = start + lengths.solve

    def solved(*operands: Any) -> list[Any]:
        return jaxpr_as_fun(solve)(*operands[start:stop], *operands[stop + lengths.transpose_solve :])

    return jax.make_jaxpr(solved)(*avals_of(eqn.invars))


_CALLS: Mapping[str, Callable[[JaxprEqn], ClosedJaxpr]] = {
    # Since JAX 0.11.1 closed_call is eval_jaxpr.
    **dict.fromkeys("jit closed_call eval_jaxpr custom_jvp_call custom_vjp_call".split(), _parameter),
    "custom_linear_solve": _solution,
    "call_hi_primitive": expanded,
}


def _bodies_of(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    bodies: list[ClosedJaxpr] = []
    for name in _BODIES[eqn.primitive.name]:
        value = eqn.params[name]
        bodies += value if isinstance(value, tuple) else [value]
    return [body if isinstance(body, ClosedJaxpr) else closed(body) for body in bodies]


def _canonical_form(function: ClosedJaxpr, scope: _Scope) -> tuple[Jaxpr, Constants]:
    jaxpr = function.jaxpr
    renamed: dict[Var, Atom] = scope.constants_of(function)
    invars = [scope.own(var, renamed) for var in jaxpr.invars]
    scope.add(jaxpr.eqns, renamed)
    outvars = [lookup(atom, renamed) for atom in jaxpr.outvars]
    eqns = without_transposed_products(scope.eqns, outvars)
    if not renamed and are_same(eqns, jaxpr.eqns):
        return jaxpr, {}
    invars = [*scope.constants, *invars]
    return with_eqns(jaxpr, eqns, constvars=[], invars=invars, outvars=outvars), scope.constants


class _Scope(Inliner):
    """The canonical equations of one body, and the constants that they read.

    Args:
      known: bodies and their canonical forms, so that what several equations have is written once.
    """

    def __init__(
        self,
        known: dict[tuple[int, ...], tuple[ClosedJaxpr, tuple[Jaxpr, Constants]]],
        is_body: bool = True,
        own_variables: bool = False,
    ):
        super().__init__(called, own_variables)
        self._known = known
        self._is_body = is_body

    def own(self, var: Var, renamed: dict[Var, Atom]) -> Var:
        if not self._own_variables:
            return var
        renamed[var] = new = Var(var.aval)
        return new

    def open(self, call: JaxprEqn, callee: ClosedJaxpr, operands: Iterable[Atom]) -> list[Atom]:
        results = super().open(call, callee, self._as_sharded(call, operands, "in_shardings"))
        return self._as_sharded(call, results, "out_shardings")

    def append(self, eqn: JaxprEqn) -> None:
        super().append(self._with_canonical_bodies(eqn))

    def _as_sharded(self, call: JaxprEqn, atoms: Iterable[Atom], name: str) -> list[Atom]:
        shardings = call.params.get(name, ()) if self._is_body else ()
        values = list(atoms)
        for i, sharding in enumerate(shardings):
            if isinstance(sharding, NamedSharding):
                self.eqns.append(constraint(values[i], sharding, call))
                (values[i],) = self.eqns[-1].outvars
        return values

    def _body(self, body: ClosedJaxpr, own_variables: bool) -> tuple[Jaxpr, Constants]:
        if own_variables:
            return _canonical_form(body, _Scope(self._known, own_variables=True))
        key = (id(body.jaxpr), *map(id, body.consts))
        if key not in self._known:
            self._known[key] = body, _canonical_form(body, _Scope(self._known))
        return self._known[key][1]

    def _with_canonical_bodies(self, eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name not in _BODIES:
            return eqn
        before = _bodies_of(eqn)
        name, params, invars = eqn.primitive.name, dict(eqn.params), list(eqn.invars)
        canonical = [self._body(body, name in _WITH_OWN_VARIABLES) for body in before]
        bodies = [jaxpr for jaxpr, _ in canonical]
        if are_same(bodies, [body.jaxpr for body in before]):
            return eqn
        read = [[self.constant(var, value) for var, value in constants.items()] for _, constants in canonical]
        if name == "while":
            first = params["cond_nconsts"]
            invars = [*read[0], *invars[:first], *read[1], *invars[first:]]
            params["cond_nconsts"] += len(read[0])
            params["body_nconsts"] += len(read[1])
        elif name == "cond":
            invars = [invars[0], *itertools.chain(*read), *invars[1:]]
            bodies = [_with_others(body, i, read) for i, body in enumerate(bodies)]
        else:
            invars = [*read[0], *invars]
            if name == "scan":
                num_consts, num_carry = scan_counts(params)
                num_xs = len(eqn.invars) - num_consts - num_carry
                counts = num_consts + len(read[0]), num_carry, num_xs, len(eqn.outvars) - num_carry
                params = with_scan_counts(params, *counts)
            elif isinstance(params.get("prevent_cse"), tuple):
                params["prevent_cse"] = (False,) * len(read[0]) + params["prevent_cse"]
        return eqn.replace(invars=invars, params=params_with_bodies(eqn, params, bodies))


def _with_others(branch: Jaxpr, number: int, constants: Sequence[Sequence[Var]]) -> Jaxpr:
    """A branch that takes the constants of all branches, in their order."""
    num_constants = len(constants[number])
    before = [Var(var.aval) for of_branch in constants[:number] for var in of_branch]
    behind = [Var(var.aval) for of_branch in constants[number + 1 :] for var in of_branch]
    invars = [*before, *branch.invars[:num_constants], *behind, *branch.invars[num_constants:]]
    return with_eqns(branch, branch.eqns, invars=invars)


def params_with_bodies(eqn: JaxprEqn, params: Mapping[str, Any], bodies: Iterable[Jaxpr]) -> dict[str, Any]:
    rest = iter(bodies)
    new: dict[str, Any] = {}
    for name in _BODIES[eqn.primitive.name]:
        before = eqn.params[name]
        if isinstance(before, tuple):
            new[name] = tuple(map(closed, rest))
        else:
            body = next(rest)
            new[name] = closed(body) if isinstance(before, ClosedJaxpr) else body
    return {**params, **new}


def constraint(value: Atom, sharding: NamedSharding, like: JaxprEqn) -> JaxprEqn:
    """An equation that constrains the sharding of a value, over ``Auto`` axes, at the line of ``like``."""
    mesh = with_auto_axes(sharding.mesh)
    over_auto_axes = NamedSharding(mesh, sharding.spec)
    shape = jax.ShapeDtypeStruct(aval_of(value).shape, aval_of(value).dtype)
    with within(mesh) if isinstance(mesh, AbstractMesh) else contextlib.nullcontext():
        jaxpr = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, over_auto_axes))(shape)
    (eqn,) = jaxpr.eqns
    outvars = [Var(aval_of(value))]
    return eqn.replace(invars=[value], outvars=outvars, source_info=like.source_info, ctx=like.ctx)
