"""Splits a stage's backward in two: the gradient of its input, which another stage waits for, and the rest.

The rest is the gradient of the stage's weights, which may come any time later; that is what zero-bubble
schedules fill their gaps with.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import cond_p, scan_p

from mpmd.compiler.graph import StageWork, stage_work
from mpmd.compiler.jaxprs.control_flow import with_results
from mpmd.compiler.jaxprs.equations import (
    free_variables,
    is_dropped,
    makers_of,
    needed_eqns,
    variables,
)
from mpmd.compiler.jaxprs.remat import without_remat
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.ir.plan import Cell, TaskType


def split_backwards(
    eqns: Mapping[TaskType, Sequence[JaxprEqn]], tasks: Iterable[Iterable[Cell]], duplicates: Set[Var]
) -> tuple[StageWork, ...]:
    """The work, with two halves of the backward of each stage for which the schedule has ``bwdA`` tasks.

    A half without equations is left out: the first stage, whose input has no gradient, has no ``bwdA``, and
    a stage without weights no ``bwdW``.

    Args:
      eqns: the equations of each work, in the order of a microbatch.
      duplicates: the variables that each reader computes itself.
    """
    halved = {task.stage for cells in tasks for cell in cells for task in cell.tasks if task.kind == "bwdA"}
    divided: dict[TaskType, Sequence[JaxprEqn]] = {}
    for work, eqns_of_work in eqns.items():
        if work.kind == "bwd" and work.stage in halved:
            outside = {var for other in eqns if other != work for var in free_variables(eqns[other])}
            first, second = _halves(eqns_of_work, outside, duplicates)
            halves = {TaskType("bwdA", work.stage): first, TaskType("bwdW", work.stage): second}
            divided |= {half: eqns_of_half for half, eqns_of_half in halves.items() if eqns_of_half}
        else:
            divided[work] = eqns_of_work
    return stage_work(divided)


def _halves(
    backward: Sequence[JaxprEqn], outside: Set[Var], duplicates: Set[Var]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Divides the equations of a stage's ``bwd`` between its ``bwdA`` and its ``bwdW``.

    Rematerialized functions are opened, since their barriers against merging with the forward have no use in
    another executable, and scans are divided, so that only cheap equations are in both halves.

    Args:
      outside: the variables that other work reads.
    """
    first, second = _divide(without_remat(backward), outside)
    copied = [eqn for eqn in first if not duplicates.isdisjoint(eqn.outvars)]
    return first, [*needed_eqns(copied, free_variables(second)), *second]


def _divide(eqns: Sequence[JaxprEqn], results: Iterable[Var]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Returns the backward slice of ``results`` and the other equations; divides scans that both need."""
    needed = set(results)
    first: list[JaxprEqn] = []
    second: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        now = [i for i, var in enumerate(eqn.outvars) if var in needed]
        if not now:
            second.append(eqn)
            continue
        now_needed = [eqn]
        if len(now) < len(eqn.outvars):
            now_needed, rest = _take_apart(eqn, now)
            second.extend(reversed(rest))
        first.extend(reversed(now_needed))
        needed.update(free_variables(now_needed))
    return first[::-1], second[::-1]


def _take_apart(eqn: JaxprEqn, now: Sequence[int]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    later = [i for i, var in enumerate(eqn.outvars) if i not in now and not is_dropped(var)]
    if later and eqn.primitive is cond_p and not eqn.effects:
        return [with_results(eqn, now)], [with_results(eqn, later)]
    if later and eqn.primitive is scan_p and not eqn.effects:
        return _take_scan_apart(eqn, set(now))
    return [eqn], []


def _take_scan_apart(eqn: JaxprEqn, now: set[int]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Returns a scan for the results ``now``, and a scan for the rest that reads stacks of the first."""
    scan = Scan.of(eqn)
    body, carry = scan.body, scan.body.invars[scan.carry]
    eqns = without_remat(body.eqns)
    while True:  # until every carried value that the first scan reads is carried by it
        outputs = variables(body.outvars[i] for i in now)
        first, second = _divide(eqns, outputs)
        read = {*free_variables(first), *outputs}
        read_carry = {i for i, var in enumerate(carry) if var in read}
        if read_carry <= now:
            break
        now |= read_carry
    later = {i for i, var in enumerate(eqn.outvars) if i not in now and not is_dropped(var)}
    if not later:
        return [eqn], []
    known = makers_of(first).keys() | {carry[i] for i in now if i < len(carry)}
    results = variables(body.outvars[i] for i in later)
    stacked = [var for var in dict.fromkeys([*free_variables(second), *results]) if var in known]
    one, stacks = scan.part(first, now, extra_outputs=stacked)
    two, _ = scan.part(second, later, extra_inputs=dict(zip(stacked, stacks, strict=True)))
    return [one], [two]
