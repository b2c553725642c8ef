"""Puts into the work of each stage the cheap equations that all their readers compute themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import operands
from mpmd.compiler.split.duplicates import Duplicate
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.compiler.split.remove_marks import LoopBody
from mpmd.ir.plan import TaskType


def copy_duplicates(
    eqns: Mapping[TaskType, Sequence[JaxprEqn]],
    body: LoopBody,
    duplicates: Mapping[Var, Duplicate],
    order: MicrobatchOrder,
) -> dict[TaskType, tuple[JaxprEqn, ...]]:
    """Each work with the duplicates that it reads, in the order in which a microbatch passes through it."""
    readers: dict[Var, set[TaskType]] = {}

    def add_reader(work: TaskType, eqn: JaxprEqn) -> None:
        for var in operands(eqn):
            if var in duplicates:
                readers.setdefault(var, set()).add(work)

    for work, eqns_of_work in eqns.items():
        for eqn in eqns_of_work:
            add_reader(work, eqn)
    copied: dict[TaskType, list[JaxprEqn]] = {}
    for eqn in (member.eqn for member in reversed(body.eqns)):
        works = set().union(*(readers.get(var, ()) for var in eqn.outvars))
        if works and duplicates[eqn.outvars[0]].once_per_stage:
            latest_first = sorted(works, key=order.position, reverse=True)
            works = {*{work.stage: work for work in latest_first}.values()}  # the first work of each stage
        for work in works:
            copied.setdefault(work, []).append(eqn)
            add_reader(work, eqn)
    return {work: (*reversed(copied.get(work, ())), *eqns[work]) for work in sorted(eqns, key=order.position)}
