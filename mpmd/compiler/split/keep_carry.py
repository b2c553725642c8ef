"""Keeps a copy of a carried value for work that reads the old value after its update."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import Accumulator, StageWork
from mpmd.compiler.jaxprs.equations import free_variables, makers_of, operands, substitute
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.jaxprs.traced import copy_of
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.errors import CompileError
from mpmd.ir.plan import TaskType
from mpmd.schedules import Schedule

Eqns = Sequence[JaxprEqn]


def keep_carry(
    eqns: Mapping[TaskType, Eqns], accumulators: Sequence[Accumulator], order: MicrobatchOrder
) -> dict[TaskType, Eqns]:
    """Returns the work with every carried value read, in place, only by the work that updates it.

    Later stages, and the stage's backward, which may recompute a part of the forward, read a copy that the
    updating work makes; the copy is a value of the microbatch.

    Raises: ``CompileError`` for work that reads a carried value before the work that updates it: no
      microbatch could begin before the previous microbatch has reached that stage.
    """
    kept: dict[TaskType, Eqns] = {work: list(eqns_of_work) for work, eqns_of_work in eqns.items()}
    faults: dict[str, None] = {}
    for a in accumulators:
        if not a.is_carry:
            continue
        readers = [work for work in kept if work != a.work and a.state in free_variables(kept[work])]
        at = order.position(a.work)
        if early := [work for work in readers if not order.precedes(at, order.position(work))]:
            faults[_fault(a, early[0], kept, order)] = None
        elif readers:
            copy = copy_of(a.state)
            kept[a.work] = [copy, *kept[a.work]]
            for work in readers:
                kept[work] = [substitute(eqn, {a.state: copy.outvars[0]}) for eqn in kept[work]]
    if faults:
        raise CompileError(list(faults))
    return kept


def check_carry(schedule: Schedule, stages: Sequence[StageWork], accumulators: Sequence[Accumulator]) -> None:
    """Checks that a value that a backward carries is read and updated in one of its halves.

    Raises: ``CompileError`` naming the schedule.
    """
    readers: dict[Var, set[TaskType]] = collections.defaultdict(set)
    for member in stages:
        for var in member.reads:
            readers[var].add(member.work)
    for a in accumulators:
        if a.is_carry and (others := readers[a.state] - {a.work}):
            raise CompileError(
                f"the schedule {schedule} splits backwards, but {min(others)} reads a value that treduce "
                f"carries and {a.work} updates: use a schedule with whole backwards, such as Std1F1B"
            )


def _fault(a: Accumulator, early: TaskType, eqns: Mapping[TaskType, Eqns], order: MicrobatchOrder) -> str:
    reader = next(eqn for eqn in eqns[early] if a.state in operands(eqn))
    makers = makers_of(eqns[a.work])
    copied = next(iter(operands(makers[a.updated])), a.updated)
    updater = makers.get(copied, makers[a.updated])
    if order.slices > 1:
        first, last = (order.numbers.stage_text(work.stage) for work in (early, a.work))
        return (
            f"{reader.primitive} at {where(reader)} reads, in {first}, a value that treduce carries from one "
            f"microbatch to the next, and {last} updates it with what {updater.primitive} at "
            f"{where(updater)} makes: a carried value has to be updated once in a microbatch, on the slice "
            "and in the stage that read it first. Hand on what every slice updates from slice to slice, in "
            "the loop over slices, or return it as a result with an operation such as Add"
        )
    return (
        f"{reader.primitive} at {where(reader)} reads, in {early}, a value that treduce carries from one "
        f"microbatch to the next, and {a.work} updates it with what {updater.primitive} at {where(updater)} "
        "makes: a carried value has to be updated in the stage that reads it first, or each microbatch would "
        "wait for the one before it to pass all stages between"
    )
