"""Cuts a scan at the marks that its user has written in its body."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import scan_p

from mpmd.compat import replace_calls, scan_counts
from mpmd.compiler.cut_scans.cut_scan import cut_scan
from mpmd.compiler.cut_scans.index_loops import index_faults
from mpmd.compiler.cut_scans.layer_ranges import MarkedScan
from mpmd.compiler.jaxprs.equations import closed, dependents, is_among, makers_of, subjaxprs
from mpmd.compiler.jaxprs.marks import first_mark, has_mark, marks_in, without_identities
from mpmd.compiler.jaxprs.source import where
from mpmd.errors import CompileError
from mpmd.language.annotate import Boundary, Mark, mark_of, mark_p
from mpmd.language.decisions import slices_of_loop

AS_PYTHON_LOOP = (
    "A scan over slices is one loop, which cannot be cut: write it as a Python loop over slices, with lists "
    "of what one slice hands to the next"
)


def cut_marked_scan(args: Sequence[Any], params: Mapping[str, Any]) -> list[Any] | None:
    """The results of a scan with marks in its body, in the function of a loop; ``None`` for other scans.

    Raises: ``CompileError`` for marks that do not fit the scan, and if it takes rows by a counter.
    """
    if not (slices := slices_of_loop()):
        return None
    marks = list(marks_in(params["jaxpr"].jaxpr))
    if not marks or any(
        mark.linear or not mark.forward for _, mark in marks
    ):  # of a derivative, as JAX writes it
        return None
    body: Jaxpr = params["jaxpr"].jaxpr
    if faults := dict.fromkeys(_misplaced(body)):
        raise CompileError(list(faults))
    bare = closed(without_identities(body, mark_p), params["jaxpr"].consts)
    if not params["length"]:
        return scan_p.bind(*args, **{**params, "jaxpr": bare})
    boundary, line = marks[0][1].boundary, where(marks[0][0])
    try:
        marked = _marked_carry(params, marks)
        counts = iterations_of(boundary, params["length"], line)
    except ValueError as error:
        raise CompileError(f"{error}. {AS_PYTHON_LOOP}" if slices > 1 else str(error)) from None
    ends = {end: boundary.end(number) for number, end in enumerate(itertools.accumulate(counts))}
    notes = [MarkedScan(line, fault) for fault in index_faults(params, line)]
    return cut_scan(params, args, marked, ends, [(params["length"], bare)], notes)


replace_calls(scan_p, cut_marked_scan)


def _misplaced(jaxpr: Jaxpr) -> Iterator[str]:
    """The faults of marks in the body of a scan, where no stage can end; inner scans are cut already."""
    for eqn in jaxpr.eqns:
        if (mark := mark_of(eqn)) and mark.boundary.in_scan:
            yield (
                f"mark_stage_end at {where(eqn)} is inside a scan within a scan: put it in the body of the "
                "outer one, behind the inner one, or write the outer one as a Python loop, if it calls a "
                "network of several stages again and again"
            )
        name = eqn.primitive.name
        if name in ("cond", "while") and has_mark(eqn):
            inside = "a while loop" if name == "while" else "a lax.cond or lax.switch"
            yield f"{first_mark(eqn)} is inside {inside}; put the mark outside it"
        elif name.startswith(("custom_jvp_call", "custom_vjp_call")) and has_mark(eqn):
            yield (
                f"{first_mark(eqn)} is inside a function with a derivative rule of its own, by "
                "jax.custom_jvp or jax.custom_vjp, in a scan, and the rule calls it again: mark what the "
                "function returns"
            )
        else:
            for inner in subjaxprs(eqn):
                yield from _misplaced(inner)


def _marked_carry(params: Mapping[str, Any], marks: Sequence[tuple[JaxprEqn, Mark]]) -> list[int]:
    """The positions of the carried values that marks stand on.

    Raises: ``ValueError`` for marks of several ends, and for marks of values that the scan does not carry.
    """
    body: Jaxpr = params["jaxpr"].jaxpr
    if len({mark.boundary for _, mark in marks}) > 1:
        lines = ", ".join(sorted({where(eqn) for eqn, _ in marks}))
        raise ValueError(
            f"a scan has several marks in its body, at {lines}: a stage ends after a whole iteration, so "
            "leave one of them"
        )
    marked_eqns = (eqn for eqn in body.eqns if mark_of(eqn) or has_mark(eqn))
    reached = dependents(body.eqns, makers_of(marked_eqns))
    carried = body.outvars[: scan_counts(params)[1]]
    marked = [i for i, atom in enumerate(carried) if is_among(atom, reached)]
    if not marked:
        raise ValueError(_not_carried(where(marks[0][0]), has_carry=bool(carried)))
    return marked


def _not_carried(line: str, has_carry: bool) -> str:
    if has_carry:
        return (
            f"mark_stage_end at {line} is in a scan that does not carry what it returns to the next "
            "iteration, so no stage can end there: mark what the scan carries, and return it as the carry"
        )
    return (
        f"mark_stage_end at {line} is in a scan that carries nothing, such as jax.lax.map: its iterations do "
        "not follow one another as stages do. To divide into stages what is done for each element, call "
        "jax.vmap instead of jax.lax.map; for layers that follow one another, use jax.lax.scan, mark what "
        "one hands to the next, and return it as the carry"
    )


def iterations_of(boundary: Boundary, length: int, line: str) -> tuple[int, ...]:
    """The number of iterations of each stage that ends in a scan.

    Raises: ``ValueError`` when ``length`` iterations cannot be divided as ``boundary`` says.
    """
    at = f"mark_stage_end at {line} is in a scan of {length} iterations"
    if boundary.num_stages is not None:
        if length < boundary.num_stages:
            raise ValueError(
                f"{at}, which cannot be divided into num_stages={boundary.num_stages}: each stage has one "
                "at least"
            )
        return _divided(length, boundary.num_stages)
    every = 1 if boundary.every is None else boundary.every
    if isinstance(every, int):
        if length % every:
            few = max(length // every, 1)
            raise ValueError(
                f"{at}, which every={every} does not divide: give the iterations of each stage, such as "
                f"every={_divided(length, few)}, or num_stages={few}"
            )
        return (every,) * (length // every)
    if sum(every) != length:
        raise ValueError(
            f"{at}, but every={every} has {sum(every)}: give the numbers of all stages, which add up to "
            f"{length}"
        )
    return every


def _divided(length: int, stages: int) -> tuple[int, ...]:
    few, more = divmod(length, stages)
    return (few + 1,) * more + (few,) * (stages - more)
