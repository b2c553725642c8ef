"""Traces a train step once, and finds its microbatch loop."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh

from mpmd.annotate import mark_p
from mpmd.errors import CompileError
from mpmd.feedback import find_feedback
from mpmd.graph import TracedStep
from mpmd.jaxpr import NAMELESS, any_inside, inline_calls, operands, subjaxprs, traced_eqns, where, with_eqns
from mpmd.marks import number_marks
from mpmd.meshes import without_devices
from mpmd.reduce import SCOPE, treduce_p
from mpmd.sharding import within
from mpmd.tree import argument_paths, paths


def trace(fun: Callable, args: tuple, kwargs: dict[str, Any], submesh: AbstractMesh) -> TracedStep:
    """Traces ``fun(*args, **kwargs)`` under the groups' submesh.

    Args:
      fun: the step; static arguments are already bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.

    Raises: ``CompileError`` for a step without exactly one loop, and for marks where no stage can end.
    """
    closed, out_shape = _make_jaxpr(fun, args, kwargs, submesh)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    jaxpr, hoisted = inline_calls(without_devices(closed.jaxpr, submesh), lambda eqn: True)
    constants |= hoisted
    jaxpr, hoisted = _bare_body(jaxpr)
    constants |= hoisted
    _check(jaxpr)
    numbered = [number_marks(eqn) if eqn.primitive is treduce_p else eqn for eqn in jaxpr.eqns]
    jaxpr = with_eqns(jaxpr, numbered)
    jaxpr = _with_results_as_values(jaxpr)
    jaxpr = _without_dead_code(jaxpr)
    loop = next((eqn for eqn in jaxpr.eqns if eqn.primitive is treduce_p), None)
    if loop is None:
        raise CompileError("no result of the step depends on its treduce")
    used = set(jaxpr.constvars)
    return TracedStep(
        jaxpr,
        {var: value for var, value in constants.items() if var in used},
        loop,
        argument_paths(args, kwargs),
        paths(out_shape),
        out_shape,
        find_feedback((*args, *kwargs.values()), out_shape, jaxpr),
    )


def _make_jaxpr(fun: Callable, args: tuple, kwargs: dict[str, Any], submesh: AbstractMesh) -> tuple[Any, Any]:
    """Traces within the submesh, for specs without a mesh, or else without, for ``shard_map``s with one.

    Within a mesh JAX refuses a ``shard_map`` over another one, with a ``ValueError`` like any other.
    """
    make = jax.make_jaxpr(fun, return_shape=True)
    try:
        with within(submesh):
            return make(*args, **kwargs)
    except ValueError as error:
        try:
            with within(AbstractMesh((), ())):
                return make(*args, **kwargs)
        except (ValueError, RuntimeError):
            raise error from error.__cause__


def _bare_body(jaxpr: Jaxpr) -> tuple[Jaxpr, dict[Var, Any]]:
    """Inlines, in the bodies of loops, the calls that have marks inside."""
    eqns: list[JaxprEqn] = []
    constants: dict[Var, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            body, hoisted = inline_calls(eqn.params["body"], lambda inner: any_inside(inner, mark_p))
            closed_over = len(body.constvars) - len(hoisted)
            # The values that the inlined calls closed over become operands of the loop.
            invars = [*eqn.invars[:closed_over], *hoisted, *eqn.invars[closed_over:]]
            eqn = eqn.replace(invars=invars, params={**eqn.params, "body": body})
            constants |= hoisted
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns, constvars=[*jaxpr.constvars, *constants]), constants


def _with_results_as_values(jaxpr: Jaxpr) -> Jaxpr:
    """Computes the results that are literals or constants, so that each is a value of the step."""
    eqns, outvars = list(jaxpr.eqns), []
    for atom in jaxpr.outvars:
        if isinstance(atom, Literal) or atom in jaxpr.constvars:
            copies, (atom,) = traced_eqns(lambda x: [jnp.copy(x)], [atom])
            eqns += copies
        outvars.append(atom)
    return with_eqns(jaxpr, eqns, outvars=outvars)


_WHERE_A_MARK_CANNOT_BE = {
    "scan": "a scan; write the layers of different stages as separate scans with the mark between them",
    "while": "a while loop; put the mark outside the loop",
    "cond": "a lax.cond or lax.switch; put the mark outside it",
    "remat2": "jax.checkpoint (remat); apply it to the parts of a stage, with the mark between them",
    "checkpoint": "jax.checkpoint (remat); apply it to the parts of a stage, with the mark between them",
    "treduce": "a treduce within a treduce; only the outer loop can be pipelined",
}


def _check(jaxpr: Jaxpr) -> None:
    """Raises with all that is wrong with loops and marks."""
    faults: list[str] = []
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive is treduce_p]
    for eqn in jaxpr.eqns:
        if eqn.primitive is mark_p:
            faults.append(
                f"mark_stage_end at {where(eqn)} is outside of any treduce; "
                "only the function that treduce applies to each microbatch has stages"
            )
        elif eqn.primitive is not treduce_p:
            if any_inside(eqn, treduce_p):
                faults.append(
                    f"the treduce at {where(eqn)} is inside {eqn.primitive}; "
                    "call it directly in the step, or in functions under jax.jit"
                )
            if any_inside(eqn, mark_p):
                faults.append(_mark_outside(eqn))
    if not loops and not faults:
        faults.append("the step has no treduce: wrap the loop over microbatches in mpmd.treduce")
    if len(loops) > 1:
        faults.append(
            f"the step has {len(loops)} treduce loops, at {', '.join(map(where, loops))}; "
            "a step takes one: merge them, or write two steps"
        )
    for loop in loops:
        faults.extend(
            f"mark_stage_end at {_mark_inside(eqn)} is inside {_described(eqn)}"
            for eqn in loop.params["body"].eqns
            if eqn.primitive is not mark_p and any_inside(eqn, mark_p)
        )
    if faults:
        raise CompileError(list(dict.fromkeys(faults)))


def _mark_outside(eqn: JaxprEqn) -> str:
    if SCOPE in re.split(r"[/()]", str(eqn.source_info.name_stack)):
        return (
            f"the treduce at {where(eqn)} is differentiated or batched: call jax.grad or jax.vmap inside the "
            "function that treduce applies to each microbatch"
        )
    return f"mark_stage_end inside {eqn.primitive} at {where(eqn)}, outside of any treduce"


def _described(eqn: JaxprEqn) -> str:
    return _WHERE_A_MARK_CANNOT_BE.get(eqn.primitive.name, f"{eqn.primitive}; put the mark outside it")


def _mark_inside(eqn: JaxprEqn) -> str:
    for inner in subjaxprs(eqn):
        for candidate in inner.eqns:
            if candidate.primitive is mark_p:
                return where(candidate)
            if any_inside(candidate, mark_p):
                return _mark_inside(candidate)
    raise AssertionError(f"{eqn.primitive} has no mark inside")


def _without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Removes equations, and parts of the loop, that no result needs; keeps the arguments."""
    jaxpr = _dce(jaxpr)
    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append(_trim_loop(jaxpr, eqn) if eqn.primitive is treduce_p else eqn)
    return _dce(with_eqns(jaxpr, eqns))


def _dce(jaxpr: Jaxpr) -> Jaxpr:
    constvars = jaxpr.constvars
    open_jaxpr = jaxpr.replace(constvars=[], invars=[*constvars, *jaxpr.invars], debug_info=NAMELESS)
    needed = [False] * len(constvars) + [True] * len(jaxpr.invars)
    smaller, used = partial_eval.dce_jaxpr(open_jaxpr, [True] * len(jaxpr.outvars), needed)
    kept = sum(used[: len(constvars)])
    return smaller.replace(constvars=smaller.invars[:kept], invars=smaller.invars[kept:], debug_info=NAMELESS)


def _trim_loop(jaxpr: Jaxpr, loop: JaxprEqn) -> JaxprEqn:
    """Drops the loop's unused results, and what only they need."""
    read = {var for eqn in jaxpr.eqns for var in operands(eqn)} | {
        atom for atom in jaxpr.outvars if isinstance(atom, Var)
    }
    used = [var in read for var in loop.outvars]
    body, summed = loop.params["body"], loop.params["summed"]
    closed_over, states = loop.invars[: len(body.constvars)], loop.invars[len(body.constvars) :]
    index, *carried = body.invars
    carried_used = [keep for keep, is_sum in zip(used, summed, strict=True) if not is_sum]
    kept_carried = [var for var, keep in zip(carried, carried_used, strict=True) if keep]
    dropped = [var for var, keep in zip(carried, carried_used, strict=True) if not keep]
    outvars = [atom for atom, keep in zip(body.outvars, used, strict=True) if keep]
    open_body = body.replace(
        constvars=[],
        invars=[*body.constvars, *dropped, index, *kept_carried],
        outvars=outvars,
        debug_info=NAMELESS,
    )
    free = len(body.constvars) + len(dropped)
    needed = [False] * free + [True] * (1 + len(kept_carried))
    smaller, kept = partial_eval.dce_jaxpr(open_body, [True] * len(outvars), needed)
    assert not any(kept[len(body.constvars) : free]), "a dropped state is still read"
    number = sum(kept[: len(body.constvars)])
    smaller = smaller.replace(
        constvars=smaller.invars[:number], invars=smaller.invars[number:], debug_info=NAMELESS
    )
    invars = [atom for atom, keep in zip(closed_over, kept, strict=False) if keep]
    invars += [state for state, keep in zip(states, used, strict=True) if keep]
    return loop.replace(
        invars=invars,
        outvars=[var for var, keep in zip(loop.outvars, used, strict=True) if keep],
        params={
            **loop.params,
            "body": smaller,
            **{name: tuple(itertools.compress(loop.params[name], used)) for name in ("summed", "ordered")},
        },
    )
