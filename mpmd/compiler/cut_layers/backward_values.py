"""Finds the value that a slice hands to an earlier stage of a later slice, for the error that refuses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import aval_of, dependents, makers_of, operands
from mpmd.compiler.jaxprs.printing import type_text
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.steps import Loop
from mpmd.language.annotate import mark_of


def backward_value(loop: Loop, ends: Sequence[JaxprEqn], passed: Mapping[Var, int]) -> str | None:
    """Returns the error for a loop in which a slice reads a value that a later stage computes from an
    earlier slice.

    A Python loop over slices writes all marks of a slice before the marks of the next slice, so the
    position of a mark gives its stage. A mark that depends on more marks than there are stages before its
    own depends on a value of this kind, which the stage reads in addition to its own part of the
    microbatch.

    Args:
      ends: the marks that end stages.
      passed: for each value, the length of the longest chain of marks that it depends on.

    Returns: ``None`` when the marks are wrong for another reason.
    """
    num_stages, slices = loop.schedule.num_stages, loop.schedule.slices
    in_slice = max(len(ends) // slices, 1)
    late = next((i for i, eqn in enumerate(ends) if passed[eqn.outvars[0]] > i % in_slice + 1), None)
    lines = [where(eqn) for eqn in ends]
    in_loop_over_slices = in_slice in (num_stages - 1, num_stages) and lines == lines[:in_slice] * slices
    if late is None or not in_loop_over_slices:
        return None
    stage = late % in_slice
    later = {var for var, marks in passed.items() if marks > stage}
    of_microbatch = dependents(loop.eqns, [loop.index])
    makers = makers_of(loop.eqns)

    def later_operand(eqn: JaxprEqn) -> Var:
        return next(var for var in operands(eqn) if var in later)

    reader = ends[late]
    while later.issuperset(of_microbatch.intersection(operands(reader))):
        reader = makers[later_operand(reader)]
        if mark_of(reader):
            return None
    value = later_operand(reader)
    while not mark_of(makers[value]) and where(makers[value]) == where(reader):
        value = later_operand(makers[value])
    maker = makers[value]
    marks_before = sum(eqn in ends for eqn in loop.eqns[: loop.eqns.index(maker) + 1])
    source = "the last stage" if passed[value] >= num_stages - 1 else f"stage {passed[value]}"
    target = f"stage {stage}" if stage else "the first stage"
    return (
        f"in the function that treduce at {loop.where} applies, a value runs from {source} of one slice to "
        f"{target} of the next: slice {(marks_before - 1) // in_slice} makes {type_text(aval_of(value))} at "
        f"{where(maker)}, and slice {late // in_slice} reads it at {where(reader)}. Each slice would wait "
        "for the whole pipeline: hand it to the same layer of the next slice, such as keys and values or a "
        "state, as it is before mark_stage_end"
    )
