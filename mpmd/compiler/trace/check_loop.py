"""Refuses steps whose loops and marks cannot be compiled, with all reasons at once."""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.annotate import mark_p
from mpmd.compiler.jaxprs.equations import any_inside, subjaxprs
from mpmd.compiler.jaxprs.source import is_in_scope, where
from mpmd.errors import CompileError
from mpmd.reduce import SCOPE, treduce_p

_WHERE_A_MARK_CANNOT_BE = {
    "scan": "a scan; write the layers of different stages as separate scans with the mark between them",
    "while": "a while loop; put the mark outside the loop",
    "cond": "a lax.cond or lax.switch; put the mark outside it",
    "remat2": "jax.checkpoint (remat); apply it to the parts of a stage, with the mark between them",
    "checkpoint": "jax.checkpoint (remat); apply it to the parts of a stage, with the mark between them",
    "treduce": "a treduce within a treduce; only the outer loop can be pipelined",
}


def check_loop(jaxpr: Jaxpr) -> None:
    """Checks that a step has no loop or one that can be pipelined, and marks only where a stage can end.

    Where there is no loop, no stage ends, and marks may be anywhere.

    Args:
      jaxpr: the step, with calls inlined.

    Raises: ``CompileError`` with all that is wrong.
    """
    faults: list[str] = []
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive is treduce_p]
    for eqn in jaxpr.eqns:
        if eqn.primitive is mark_p and loops:
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
            if any_inside(eqn, mark_p) and (loops or is_in_scope(eqn, SCOPE)):
                faults.append(_mark_outside(eqn))
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
    if is_in_scope(eqn, SCOPE):
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
