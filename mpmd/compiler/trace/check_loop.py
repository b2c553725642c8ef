"""Refuses steps whose loops and marks cannot be compiled, with all reasons at once."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.equations import is_remat, subjaxprs
from mpmd.compiler.jaxprs.marks import first_mark, has_mark
from mpmd.compiler.jaxprs.source import is_in_scope, line_of, where
from mpmd.errors import CompileError
from mpmd.language.annotate import mark_of
from mpmd.language.reduce import SCOPE, treduce_p

_WHERE_A_MARK_CANNOT_BE = {
    "while": "a while loop; put the mark outside the loop, or write it as a lax.scan",
    "cond": "a lax.cond or lax.switch; put the mark outside it",
    "treduce": "a treduce within a treduce; only the outer loop can be pipelined",
}

_LOOP_OF_STEPS = (
    ". Write a Python loop of steps, as for batch in batches: state = step(state, batch): steps are queued, "
    "and state stays on its groups. Where a loop of an optimizer evaluates a loss, leave out the treduce"
)
_RECOMPUTATION = (
    ". Put jax.checkpoint around layers, or around the loss, in the function that treduce applies to each "
    "microbatch"
)
_INSTEAD = {
    "scan": _LOOP_OF_STEPS,
    "while": _LOOP_OF_STEPS,
    "jax.checkpoint": _RECOMPUTATION,
}
"""Remedies for a loop inside an equation, by the name of the equation."""


def check_loop(jaxpr: Jaxpr) -> None:
    """Checks that the loops of a step can be pipelined, and that marks in them are where a stage can end.

    Outside of loops no stage ends, and marks may be anywhere.

    Args:
      jaxpr: the step in canonical form.

    Raises: ``CompileError`` with all that is wrong.
    """
    faults: list[str] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is not treduce_p:
            faults.extend(_faults_outside(eqn, eqn))
            continue
        faults.extend(_misplaced_marks(eqn.params["body"], None))
    if faults:
        raise CompileError(list(dict.fromkeys(faults)))


def _faults_outside(eqn: JaxprEqn, outer: JaxprEqn) -> Iterator[str]:
    """The loops that an equation ``outer`` of a step has inside, at ``eqn``, or was differentiated from."""
    if eqn.primitive is treduce_p:
        name = "jax.checkpoint" if is_remat(outer) else outer.primitive.name
        line = line_of(outer)
        at = f", not in the {name} at {line}" if line else ""
        yield (
            f"the treduce at {where(eqn)} is inside {name}; call it directly in the step, or in functions "
            f"under jax.jit{at}{_INSTEAD.get(name, '')}"
        )
    elif has_mark(eqn) and is_in_scope(eqn, SCOPE):
        yield (
            f"the treduce at {where(eqn)} is differentiated, but a loop has no gradient of its own: call "
            "jax.grad inside the function that treduce applies to each microbatch"
        )
    else:
        for inner in subjaxprs(eqn):
            for member in inner.eqns:
                yield from _faults_outside(member, outer)


def _misplaced_marks(jaxpr: Jaxpr, scan: JaxprEqn | None) -> Iterator[str]:
    """The faults of the marks in a loop's body, or in the body of a scan in it.

    Scans that the loop calls are cut already, but not scans of a derivative that the step takes before it.
    """
    for eqn in jaxpr.eqns:
        mark = mark_of(eqn)
        if mark is not None and not mark.forward and not mark.linear:
            yield (
                f"mark_stage_end at {where(eqn)} is in a function that jax.linear_transpose transposes, and "
                "no stage can end there: write jax.vjp(f, x)[1](cotangents) in place of "
                "jax.linear_transpose(f, x)(cotangents)"
            )
        elif mark is not None and mark.boundary.is_of_scan and scan is None:
            yield (
                f"mark_stage_end at {where(eqn)} says after which iterations stages end, but it is not in "
                "the body of a lax.scan: leave out every and num_stages, or scan over the layers"
            )
        if mark is not None or not has_mark(eqn):
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
