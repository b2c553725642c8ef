"""Finds the values that slices of a microbatch hand on to later slices, and checks their ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import StageWork
from mpmd.compiler.jaxprs.equations import free_variables, operands
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.errors import CompileError
from mpmd.ir.plan import TaskType


def handed_on(eqns: Mapping[TaskType, Sequence[JaxprEqn]], order: MicrobatchOrder) -> Set[Var]:
    """The values that the forward of a stage reads from its forwards on earlier slices, such as keys."""
    makers = {var: work for work in eqns for eqn in eqns[work] for var in eqn.outvars}
    stage_of = order.numbers.stage_of
    return {
        var
        for work in eqns
        if work.kind == "fwd" and order.slices > 1
        for var in free_variables(eqns[work])
        if (maker := makers.get(var)) is not None and stage_of(maker.stage) == stage_of(work.stage)
    }


def check_slices(stage_work: Sequence[StageWork], order: MicrobatchOrder) -> None:
    """Checks that values go from slice to slice as the tasks of schedules wait for one another.

    Raises: ``CompileError`` for a value that goes to an earlier stage of a later slice in forwards, or to a
      later stage of an earlier slice in backwards.
    """
    if order.slices == 1:
        return
    makers: dict[Var, list[StageWork]] = {}
    for member in stage_work:
        for var in member.makes:
            makers.setdefault(var, []).append(member)
    faults: dict[str, None] = {}
    for reader in stage_work:
        at = order.position(reader.work)
        for var in reader.reads:
            sources = makers.get(var, [])
            if sources and not any(order.precedes(order.position(m.work), at) for m in sources):
                faults[_fault(var, sources[0], reader, order)] = None
    if faults:
        raise CompileError(list(faults))


def _fault(var: Var, maker: StageWork, reader: StageWork, order: MicrobatchOrder) -> str:
    makes = next(eqn for eqn in maker.eqns if var in eqn.outvars)
    reads = next(eqn for eqn in reader.eqns if var in operands(eqn))
    return (
        f"{reads.primitive} at {where(reads)}, in the {_place(reader.work, order)}, reads what "
        f"{makes.primitive} at {where(makes)} makes in the {_place(maker.work, order)}. Slices hand values "
        "on within a stage, or to later stages: a value for an earlier stage would make slices wait for the "
        "whole pipeline. Compute it again in the stage that reads it, or use a schedule without slices, such "
        f"as Std1F1B(num_stages={order.numbers.num_stages})"
    )


def _place(work: TaskType, order: MicrobatchOrder) -> str:
    direction = "forward" if work.kind == "fwd" else "backward"
    return f"{direction} of {order.numbers.stage_text(work.stage)}"
