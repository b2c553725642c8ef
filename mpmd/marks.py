"""Takes the marks out of the loop's body, and notes what they said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.annotate import Boundary, mark_p
from mpmd.assign import Timeline
from mpmd.errors import CompileError
from mpmd.graph import TracedStep, Work
from mpmd.jaxpr import Atom, lookup, operands, substitute, where, with_eqns
from mpmd.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class LoopBody:
    """The loop's body over outer variables, without marks.

    Attributes:
      earliest: for each equation the time of the first work that it can belong to, as far as marks say.
      written: for each equation the stage in whose forward it is written: how many ends of stages precede it.
      closing: for work that ends with a mark, the mark's operands.
      index: the variable of the microbatch index.
      carried: the variables of the states that are not plain sums.
    """

    eqns: list[JaxprEqn]
    earliest: list[int | None]
    written: list[int]
    closing: dict[Work, list[Var]]
    outputs: list[Atom]
    index: Var
    carried: list[Var]


def number_marks(loop: JaxprEqn) -> JaxprEqn:
    """Notes in the marks which stages they end, as long as dead ones can be counted too.

    A loss that is made before the last stage leaves the marks of later stages without use. The loop gets the
    parameter ``numbered``: whether there are as many marks as its schedule has stages.
    """
    body = loop.params["body"]
    marks = [eqn for eqn in body.eqns if eqn.primitive is mark_p]
    ends = _ends(marks)
    numbered = _fits(ends, loop.params["schedule"])
    if numbered:
        stages = _stages_ended(marks, ends)
        eqns = [
            eqn.replace(params={**eqn.params, "stage": stages[eqn.outvars[0]]})
            if eqn.primitive is mark_p
            else eqn
            for eqn in body.eqns
        ]
        body = with_eqns(body, eqns)
    return loop.replace(params={**loop.params, "body": body, "numbered": numbered})


def take_out_marks(traced: TracedStep) -> LoopBody:
    """Reads the loop's body off a traced step.

    Raises ``CompileError`` when the marks do not make as many stages as the schedule has.
    """
    body: Jaxpr = traced.loop.params["body"]
    schedule: Schedule = traced.loop.params["schedule"]
    timeline = Timeline(schedule.num_stages)
    stage_of = _live_stages([eqn for eqn in body.eqns if eqn.primitive is mark_p], traced.loop)
    replacement: dict[Var, Atom] = dict(zip(body.constvars, traced.loop.invars, strict=False))
    index, *carried = body.invars
    bare = LoopBody([], [], [], {}, [], index, carried)
    written = 0
    behind: dict[Var, int] = {}  # for what a mark returns, the time of the work after it
    for eqn in body.eqns:
        earliest = max((behind[var] for var in operands(eqn) if var in behind), default=None)
        eqn = substitute(eqn, replacement)
        if eqn.primitive is not mark_p:
            bare.eqns.append(eqn)
            bare.earliest.append(earliest)
            bare.written.append(written)
            continue
        replacement.update(zip(eqn.outvars, eqn.invars, strict=True))
        stage = stage_of[eqn.outvars[0]]
        if not eqn.params["linear"]:
            written = min(stage + 1, schedule.num_stages - 1)
        if stage < schedule.num_stages - 1:  # the mark after the last stage, if any, ends nothing
            closed, opened = Work("fwd", stage), Work("fwd", stage + 1)
            if not eqn.params["forward"]:
                closed, opened = Work("bwd", stage + 1), Work("bwd", stage)
            bare.closing.setdefault(closed, []).extend(operands(eqn))
            behind.update(dict.fromkeys(eqn.outvars, timeline.time(opened)))
    bare.outputs.extend(lookup(atom, replacement) for atom in body.outvars)
    return bare


def _ends(marks: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The marks that a user's calls have left, without those that differentiation derived from them."""
    return [mark for mark in marks if mark.params["forward"] and not mark.params["linear"]]


def _fits(ends: Sequence[JaxprEqn], schedule: Schedule) -> bool:
    return len(ends) in (schedule.num_stages - 1, schedule.num_stages)


def _live_stages(marks: Sequence[JaxprEqn], loop: JaxprEqn) -> dict[Var, int]:
    """The stage that each mark ends, by the mark's first result, after dead code was removed."""
    ends, schedule = _ends(marks), loop.params["schedule"]
    if _fits(ends, schedule):
        return _stages_ended(marks, ends)
    if loop.params["numbered"]:
        return {mark.outvars[0]: mark.params["stage"] for mark in marks}
    raise CompileError(_wrong_number_of_marks(ends, schedule))


def _stages_ended(marks: Sequence[JaxprEqn], ends: Sequence[JaxprEqn]) -> dict[Var, int]:
    """The stage that each mark ends, by the mark's first result."""
    boundaries = dict.fromkeys(mark.params["boundary"] for mark in marks)
    return {
        mark.outvars[0]: stage for boundary in boundaries for mark, stage in _numbered(marks, ends, boundary)
    }


def _wrong_number_of_marks(ends: Sequence[JaxprEqn], schedule: Schedule) -> str:
    wanted = schedule.num_stages
    places = "".join(f"\n  stage {i} ends at {_place(mark)}" for i, mark in enumerate(ends))
    return (
        f"the function that treduce applies has {len(ends)} calls of mark_stage_end, which end "
        f"{len(ends)} stages, but the schedule {schedule} has {wanted} stages: it needs {wanted - 1} "
        f"marks, or {wanted} with one after the last stage.{places}"
    )


def _place(mark: JaxprEqn) -> str:
    name = mark.params["boundary"].name
    return f"{where(mark)}: {name!r}" if name else where(mark)


def _numbered(
    marks: Sequence[JaxprEqn], ends: Sequence[JaxprEqn], boundary: Boundary
) -> list[tuple[JaxprEqn, int]]:
    """The marks of one boundary, each with the stage that ends there.

    A function under ``jit`` that is called for several stages brings the same boundary several times;
    differentiation goes through those calls in reverse.
    """
    stages = [stage for stage, mark in enumerate(ends) if mark.params["boundary"] is boundary]
    numbered: list[tuple[JaxprEqn, int]] = []
    for forward in (True, False):
        same = [m for m in marks if m.params["boundary"] is boundary and m.params["forward"] == forward]
        order = stages if forward else stages[::-1]
        if forward:
            same_ends = [mark for mark in same if not mark.params["linear"]]
            numbered += zip(same_ends, order, strict=True)
            same = [mark for mark in same if mark.params["linear"]]
        numbered += [(mark, order[i % len(order)]) for i, mark in enumerate(same)]
    return numbered
