"""Takes the marks out of the loop's body, and records the work and the stage of each equation around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, lookup, operands, substitute
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.compiler.steps import Loop, LoopResult
from mpmd.ir.plan import TaskType
from mpmd.language.annotate import mark_of


@dataclasses.dataclass(frozen=True)
class LoopBody:
    """The loop's body without marks, and what the marks around each equation say.

    Attributes:
      earliest: for each equation, the position of the first work that it can belong to; ``None`` if it reads
        the result of no mark.
      written: for each equation, the stage in whose forward it is written: one more than the last stage that
        ends before the equation.
      closing: for work that ends with a mark, the mark's operands.
      results: the results of the loop, over the variables of the body without marks.
    """

    eqns: tuple[JaxprEqn, ...]
    earliest: tuple[int | None, ...]
    written: tuple[int, ...]
    closing: Mapping[TaskType, tuple[Var, ...]]
    results: tuple[LoopResult, ...]


def remove_marks(loop: Loop, order: MicrobatchOrder) -> LoopBody:
    last_stage = order.numbers.num_stages - 1
    replacement: dict[Var, Atom] = {}
    behind: dict[Var, int] = {}  # for what a mark returns, the position of the work after it
    eqns: list[JaxprEqn] = []
    earliest: list[int | None] = []
    written: list[int] = []
    closing: dict[TaskType, tuple[Var, ...]] = {}
    at = order.stages[0]
    for eqn in loop.eqns:
        after = [behind[var] for var in operands(eqn) if var in behind]
        eqn = substitute(eqn, replacement)
        mark = mark_of(eqn)
        if mark is None:
            eqns.append(eqn)
            earliest.append(order.latest(after) if after else None)
            written.append(at)
            continue
        replacement.update(zip(eqn.outvars, eqn.invars, strict=True))
        stage = mark.boundary.stage
        assert stage is not None, f"{eqn} has no stage"
        if mark.forward and not mark.linear and stage < order.stages[-1]:
            at = stage + 1
        if order.numbers.stage_of(stage) < last_stage:
            # The mark after the last stage, if any, ends nothing.
            closed, opened = TaskType("fwd", stage), TaskType("fwd", stage + 1)
            if not mark.forward:
                closed, opened = TaskType("bwd", stage + 1), TaskType("bwd", stage)
            closing[closed] = (*closing.get(closed, ()), *operands(eqn))
            behind.update(dict.fromkeys(eqn.outvars, order.position(opened)))
    results = tuple(dataclasses.replace(r, value=lookup(r.value, replacement)) for r in loop.results)
    return LoopBody(tuple(eqns), tuple(earliest), tuple(written), closing, results)
