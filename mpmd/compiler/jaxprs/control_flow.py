"""Takes a ``cond``, ``scan`` or ``while`` apart by its results, and a ``cond`` by its branches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress, count
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.interpreters import partial_eval

from mpmd.compiler.jaxprs.canonical import bodies_of, params_with_bodies
from mpmd.compiler.jaxprs.equations import (
    as_called,
    free_variables,
    make_jaxpr,
    operands,
    with_eqns,
)
from mpmd.compiler.jaxprs.scan_parts import named
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.traced import traced_eqns

CONTROL_FLOW = ("cond", "scan", "while")

Labels = frozenset[Any]


def labels_of_results(eqn: JaxprEqn, labels: Sequence[Labels]) -> list[Labels]:
    """For each result the labels of the operands that it depends on, in any iteration of a loop.

    Args:
      labels: the labels of each operand.
    """
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


def with_results(eqn: JaxprEqn, kept: Collection[int]) -> JaxprEqn:
    """Returns the conditional or loop with only the results at the positions ``kept``.

    A loop also keeps the results that these read from an earlier iteration. Another equation stays whole.
    """
    name = eqn.primitive.name
    if name == "while":
        return _while_with_results(eqn, kept)
    if name not in ("cond", "scan"):
        return eqn
    carry = Scan.of(eqn).carry if name == "scan" else slice(0)
    # JAX's own rules do the rest, but they keep all results of a ``while`` within these bodies.
    bodies = [with_eqns(b.jaxpr, live_body(b.jaxpr, kept, carry)[0].eqns) for b in bodies_of(eqn)]
    eqn = eqn.replace(params=params_with_bodies(eqn, eqn.params, bodies))
    whole = make_jaxpr(free_variables([eqn]), [eqn], [eqn.outvars[i] for i in kept])
    return partial_eval.dce_jaxpr(whole, True)[0].eqns[0]


def _while_with_results(eqn: JaxprEqn, kept: Collection[int]) -> JaxprEqn:
    conds, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = (part.jaxpr for part in bodies_of(eqn))
    _, is_read = partial_eval.dce_jaxpr(condition, True)
    kept = {*kept, *compress(count(), is_read[conds:])}
    body, is_used = live_body(body, kept, slice(consts, len(body.invars)))
    is_carried = is_used[consts:]
    condition, _ = partial_eval.dce_jaxpr(condition, True, [True] * conds + is_carried)
    params = params_with_bodies(eqn, eqn.params, [condition, body])
    return eqn.replace(
        invars=[*compress(eqn.invars, [True] * conds + is_used)],
        outvars=[*compress(eqn.outvars, is_carried)],
        params={**params, "body_nconsts": sum(is_used[:consts])},
    )


def live_body(body: Jaxpr, kept: Collection[int], carry: slice = slice(0)) -> tuple[Jaxpr, list[bool]]:
    """Returns the equations of a body that results need, and the equations with effects.

    Args:
      kept: the positions of the results.
      carry: the positions of the inputs that are the first results of the iteration before.

    Returns: the body of these equations, which also has the results that it reads from the iteration before,
      and for each input of the original body whether the new one reads or carries it.
    """
    results = set(kept)
    while True:
        needed = {atom for i in results if isinstance(atom := body.outvars[i], Var)}
        eqns: list[JaxprEqn] = []
        for eqn in reversed(body.eqns):
            of_eqn = [i for i, var in enumerate(eqn.outvars) if var in needed]
            if of_eqn or eqn.effects:
                eqns.append(with_results(eqn, of_eqn) if of_eqn else eqn)
                needed.update(operands(eqns[-1]))
        read = {i for i, var in enumerate(body.invars[carry]) if var in needed}
        if read <= results:
            break
        results |= read
    is_result = [i in results for i in range(len(body.outvars))]
    is_carried = [False] * len(body.invars)
    is_carried[carry] = is_result[: len(is_carried[carry])]
    return partial_eval.dce_jaxpr(with_eqns(body, eqns[::-1]), is_result, is_carried)


def as_selections(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations of all branches, and for each result one that selects it from the branches' results.

    So each equation can run where its own operands are. All branches are computed, whichever is taken.
    """

    def select(index, *operands):
        results = [jaxpr_as_fun(branch)(*operands) for branch in eqn.params["branches"]]
        return [lax.select_n(index, *cases) for cases in zip(*results, strict=True)]

    eqns, values = traced_eqns(select, eqn.invars)
    return [as_called(eqn, member) for member in named(eqns, values, eqn.outvars)]
