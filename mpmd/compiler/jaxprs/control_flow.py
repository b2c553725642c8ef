"""Leaves out dead code, and takes a ``cond``, ``scan`` or ``while`` apart by its results."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core.primitives import while_p
from jax.interpreters import partial_eval

from mpmd.compat import live_by_default
from mpmd.compiler.jaxprs.equations import Atom, as_called, free_variables, is_among, make_jaxpr, makers_of
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.traced import named, traced_eqns

CONTROL_FLOW = ("cond", "scan", "while")

Labels = frozenset[Any]


def labels_of_results(eqn: JaxprEqn, labels: Sequence[Labels]) -> list[Labels]:
    """For each result the labels of the operands that it depends on, in any iteration of a loop."""
    params, name = eqn.params, eqn.primitive.name
    if name == "cond":
        branches = [_labels_through(branch.jaxpr, labels[1:]) for branch in params["branches"]]
        return [labels[0].union(*of_result) for of_result in zip(*branches, strict=True)]
    if name == "scan":
        return _labels_through(params["jaxpr"].jaxpr, labels, Scan.of(eqn).carry)
    if name == "while":
        first, carry = params["cond_nconsts"], slice(params["body_nconsts"], None)
        results = _labels_through(params["body_jaxpr"].jaxpr, labels[first:], carry)
        (trips,) = _labels_through(params["cond_jaxpr"].jaxpr, [*labels[:first], *results])
        return [trips | of_result for of_result in results]
    return [frozenset().union(*labels)] * len(eqn.outvars)


def _labels_through(body: Jaxpr, labels: Sequence[Labels], carry: slice = slice(0)) -> list[Labels]:
    """The labels of a body's results, the first of which it carries to its inputs at ``carry``."""
    known: dict[Var, Labels] = {}

    def labels_of(atoms):
        return [known[atom] if isinstance(atom, Var) else frozenset() for atom in atoms]

    inputs = list(labels)
    while True:
        known.update(zip(body.invars, inputs, strict=True))
        for eqn in body.eqns:
            known.update(zip(eqn.outvars, labels_of_results(eqn, labels_of(eqn.invars)), strict=True))
        results = labels_of(body.outvars)
        carried = [before | after for before, after in zip(inputs[carry], results, strict=False)]
        if carried == inputs[carry]:
            return [*carried, *results[len(carried) :]]
        inputs[carry] = carried


def live_eqns(eqns: Sequence[JaxprEqn], results: Iterable[Atom]) -> tuple[JaxprEqn, ...]:
    """Returns the equations, or parts of equations, that ``results`` need, and equations with effects."""
    computed = makers_of(eqns)
    outvars = [atom for atom in results if is_among(atom, computed)]
    live, _ = partial_eval.dce_jaxpr(make_jaxpr(free_variables(eqns), eqns, outvars), True)
    return tuple(live.eqns)


def _live_while(is_used: list[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    """The operands that a ``while`` needs for the used results, and the loop without unneeded values.

    JAX has a rule for it since 0.12; before, each result needs all that the loop carries. JAX applies this
    rule to all functions of the process, some of which read or write a ``Ref`` in a loop: such loops stay
    whole, since their effects name operands.
    """
    is_operand, whole, uses_ref = live_by_default(is_used, eqn)
    if whole is None or uses_ref:
        return is_operand, whole
    params, num_conds, num_consts = eqn.params, eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    is_read = partial_eval.dce_jaxpr(condition.jaxpr, True)[1][num_conds:]
    is_carried = list(map(operator.or_, is_used, is_read))
    while True:
        live, is_read = partial_eval.dce_jaxpr(body.jaxpr, is_carried, [False] * num_consts + is_carried)
        if is_read[num_consts:] == is_carried:
            break
        is_carried = is_read[num_consts:]
    live_condition, by_condition = partial_eval.dce_jaxpr(
        condition.jaxpr, True, [False] * num_conds + is_carried
    )
    is_operand = [*by_condition[:num_conds], *is_read]
    live_params = {
        "cond_jaxpr": condition.replace(jaxpr=live_condition),
        "body_jaxpr": body.replace(jaxpr=live),
        "cond_nconsts": sum(by_condition[:num_conds]),
        "body_nconsts": sum(is_read[:num_consts]),
    }
    invars, outvars = itertools.compress(eqn.invars, is_operand), itertools.compress(eqn.outvars, is_carried)
    live_eqn = eqn.replace(
        invars=[*invars],
        outvars=[*outvars],
        params={**params, **live_params},
        effects=live.effects | live_condition.effects,
    )
    return is_operand, live_eqn


partial_eval.dce_rules.setdefault(while_p, _live_while)


def with_results(eqn: JaxprEqn, kept: Iterable[int]) -> JaxprEqn:
    """Returns the conditional or loop with only the results at the positions ``kept``.

    A loop also keeps the results that these read from an earlier iteration. Another equation stays whole.
    """
    (live,) = live_eqns([eqn], [eqn.outvars[i] for i in kept])
    return live


def as_selections(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations of all branches, and for each result one that selects it from the branches' results.

    So each equation can run where its own operands are. All branches are computed, whichever is taken.
    """

    def select(index, *operands):
        results = [jaxpr_as_fun(branch)(*operands) for branch in eqn.params["branches"]]
        return [lax.select_n(index, *cases) for cases in zip(*results, strict=True)]

    eqns, values = traced_eqns(select, eqn.invars)
    return [as_called(eqn, member) for member in named(eqns, values, eqn.outvars)]
