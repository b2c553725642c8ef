"""Refuses steps whose loops and marks cannot be compiled, with all reasons at once."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.equations import any_inside, is_remat, subjaxprs
from mpmd.compiler.jaxprs.source import is_in_scope, line_of, where
from mpmd.errors import CompileError
from mpmd.language.annotate import mark_of, mark_p, mark_text
from mpmd.language.reduce import SCOPE, treduce_p

_WHERE_A_MARK_CANNOT_BE = {
    "while": "a while loop; put the mark outside the loop, or write it as a lax.scan",
    "cond": "a lax.cond or lax.switch; put the mark outside it",
    "treduce": "a treduce within a treduce; only the outer loop can be pipelined",
}

_WHERE_STAGES_ARE = (
    "only the function that treduce applies to each microbatch has stages: leave out the mark, or compute "
    "this in a treduce of its own, with mpmd.ForwardOnly if it has no gradient"
)


def check_loop(jaxpr: Jaxpr) -> None:
    """Checks that the loops of a step can be pipelined, and that marks are only where a stage can end.

    Where there is no loop, no stage ends, and marks may be anywhere.

    Args:
      jaxpr: the step in canonical form.

    Raises: ``CompileError`` with all that is wrong.
    """
    faults: list[str] = []
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive is treduce_p]
    for eqn in jaxpr.eqns:
        if eqn.primitive is mark_p and loops:
            faults.append(f"{first_mark(eqn)} is outside of any treduce; {_WHERE_STAGES_ARE}")
        elif eqn.primitive is not treduce_p:
            if any_inside(eqn, treduce_p):
                faults.append(
                    f"the treduce at {where(eqn)} is inside {eqn.primitive}; "
                    "call it directly in the step, or in functions under jax.jit"
                )
            elif any_inside(eqn, mark_p) and (loops or is_in_scope(eqn, SCOPE)):
                faults.append(_mark_outside(eqn))
    for loop in loops:
        if loop.params["schedule"] is None:
            faults.append(
                f"the treduce at {where(loop)} has no schedule: give schedule=..., such as "
                "mpmd.Std1F1B(num_stages=4), or let mpmd.plan choose"
            )
        faults.extend(_misplaced_marks(loop.params["body"], None))
    if faults:
        raise CompileError(list(dict.fromkeys(faults)))


def _mark_outside(eqn: JaxprEqn) -> str:
    if is_in_scope(eqn, SCOPE):
        return (
            f"the treduce at {where(eqn)} is differentiated or batched: call jax.grad or jax.vmap inside the "
            "function that treduce applies to each microbatch"
        )
    return (
        f"{first_mark(eqn)}, inside {eqn.primitive} at {where(eqn)}, is outside of any "
        f"treduce; {_WHERE_STAGES_ARE}"
    )


def _misplaced_marks(jaxpr: Jaxpr, scan: JaxprEqn | None) -> Iterator[str]:
    """The faults of the marks in a loop's body, or in the body of a scan in it."""
    for eqn in jaxpr.eqns:
        mark = mark_of(eqn)
        if mark is not None and mark.boundary.is_of_scan and scan is None:
            yield (
                f"mark_stage_end at {where(eqn)} says after which iterations stages end, but it is not in "
                "the body of a lax.scan: leave out every and num_stages, or scan over the layers"
            )
        if mark is not None or not any_inside(eqn, mark_p):
            continue
        if is_remat(eqn):
            yield from _misplaced_marks(eqn.params["jaxpr"], scan)
        elif eqn.primitive.name != "scan" or is_in_scope(eqn, SCOPE):
            name = "treduce" if is_in_scope(eqn, SCOPE) else eqn.primitive.name
            described = _WHERE_A_MARK_CANNOT_BE.get(name, f"{name}; put the mark outside it")
            yield f"{first_mark(eqn)} is inside {described}"
        elif scan is None:
            yield from _misplaced_marks(eqn.params["jaxpr"].jaxpr, eqn)
        else:
            yield (
                f"{first_mark(eqn)} is inside a scan within a scan: put it in the body "
                "of the outer one, behind the inner one, or write the outer one as a Python loop, if it "
                "calls a network of several stages again and again"
            )


def first_mark(eqn: JaxprEqn) -> str:
    """The name in messages of a mark, or of the first of those inside an equation."""
    if mark_of(eqn):
        return mark_text(eqn, line_of(eqn))
    marked = (e for inner in subjaxprs(eqn) for e in inner.eqns if mark_of(e) or any_inside(e, mark_p))
    return first_mark(next(marked))
