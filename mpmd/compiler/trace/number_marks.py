"""Writes into each mark of the loop the number of the stage that it ends."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jax.extend.core import JaxprEqn

from mpmd.annotate import Boundary, Mark, mark_of
from mpmd.compiler.graph import Loop
from mpmd.compiler.jaxprs.source import where
from mpmd.errors import CompileError
from mpmd.schedules import Schedule


def number_marks(loop: Loop) -> Loop | None:
    """The loop with numbers in its marks; ``None`` if these are not as many as its schedule has stages.

    This comes before dead code is removed: when the loss is computed before the last stage, the marks of the
    later stages are dead code.
    """
    return _numbered(loop) if _fits(loop) else None


def number_live_marks(loop: Loop, numbered: bool) -> Loop:
    """The loop without dead code, with numbers in its marks.

    Args:
      numbered: whether ``number_marks`` gave the marks numbers, before dead code was removed.

    Raises: ``CompileError`` when they have none and do not make as many stages as the schedule has.
    """
    if _fits(loop):
        return _numbered(loop)
    if numbered:
        return loop
    raise CompileError(_wrong_number_of_marks(_ends(loop), loop.schedule))


def _marks(loop: Loop) -> list[tuple[JaxprEqn, Mark]]:
    return [(eqn, mark) for eqn in loop.eqns if (mark := mark_of(eqn))]


def _ends(loop: Loop) -> list[tuple[JaxprEqn, Mark]]:
    """The marks that the user wrote, without those that differentiation derived from them."""
    return [(eqn, mark) for eqn, mark in _marks(loop) if mark.forward and not mark.linear]


def _fits(loop: Loop) -> bool:
    """Whether there is a mark between each two stages, and perhaps one after the last stage."""
    num_stages = loop.schedule.num_stages
    return len(_ends(loop)) in (num_stages - 1, num_stages)


def _numbered(loop: Loop) -> Loop:
    """The loop with a different boundary for each stage that ends."""
    boundaries = [mark.boundary for _, mark in _ends(loop)]
    new = [Boundary(boundary.name, stage) for stage, boundary in enumerate(boundaries)]
    stage_of = {
        id(eqn): stage
        for boundary in dict.fromkeys(mark.boundary for _, mark in _marks(loop))
        for eqn, stage in _stages_at(loop, boundary, [s for s, b in enumerate(boundaries) if b is boundary])
    }
    eqns = tuple(
        eqn.replace(params={**eqn.params, "boundary": new[stage_of[id(eqn)]]}) if mark_of(eqn) else eqn
        for eqn in loop.eqns
    )
    return dataclasses.replace(loop, eqns=eqns)


def _stages_at(loop: Loop, boundary: Boundary, stages: Sequence[int]) -> Iterator[tuple[JaxprEqn, int]]:
    """The marks of one boundary, each with the stage that ends there.

    A function under ``jit`` that is called for several stages brings the same boundary several times.
    Differentiation goes through those calls in the same order forwards, and in reverse backwards.

    Args:
      stages: those that the user's own marks of this boundary end.
    """
    marks = [(eqn, mark) for eqn, mark in _marks(loop) if mark.boundary is boundary]
    own = [eqn for eqn, mark in marks if mark.forward and not mark.linear]
    tangents = [eqn for eqn, mark in marks if mark.forward and mark.linear]
    cotangents = [eqn for eqn, mark in marks if not mark.forward]
    yield from zip(own, stages, strict=True)
    yield from zip(tangents, itertools.cycle(stages), strict=False)
    yield from zip(cotangents, itertools.cycle(reversed(stages)), strict=False)


def _wrong_number_of_marks(ends: Sequence[tuple[JaxprEqn, Mark]], schedule: Schedule) -> str:
    found, wanted = len(ends), schedule.num_stages
    places = "".join(f"\n  stage {i} ends at {_place(*end)}" for i, end in enumerate(ends))
    return (
        f"the function that treduce applies has {_count(found, 'call')} of mark_stage_end, which end "
        f"{_count(found, 'stage')}, but the schedule {schedule} has {_count(wanted, 'stage')}: it needs "
        f"{_count(wanted - 1, 'mark')}, or {wanted} with one after the last stage.{places}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _place(eqn: JaxprEqn, mark: Mark) -> str:
    name = mark.boundary.name
    return f"{where(eqn)}: {name!r}" if name else where(eqn)
