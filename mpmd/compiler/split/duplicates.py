"""Finds the cheap equations of the loop that every reader computes itself instead of receiving the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.cost import draws_random_bits, has_reduction, is_cheap, is_renamed
from mpmd.compiler.jaxprs.equations import Atom, is_inexact, makers_of, operands, size
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.compiler.split.remove_marks import LoopBody
from mpmd.ir.plan import TaskType


@dataclasses.dataclass(frozen=True)
class Duplicate:
    """An equation that each of its readers computes itself, so that its value is neither sent nor kept.

    Attributes:
      of_microbatch: depends on the microbatch index.
      weights: the large floating-point loop constants on which it depends, other than through the slice of a
        microbatch. They are taken for parameters.
      once_per_stage: is computed once by a stage that reads it, and kept for the stage's backward;
        otherwise by each task that reads it.
    """

    of_microbatch: bool
    weights: frozenset[Var]
    once_per_stage: bool


def find_duplicates(body: LoopBody, index: Var, has_scalar_weights: bool = False) -> dict[Var, Duplicate]:
    """The duplicates among a loop body's equations, by the variables they define.

    An equation is duplicated when it is cheap and reads nothing that a stage computes. An equation that mixes
    parameters with a microbatch is not, even if it is cheap: otherwise every reader of a normalised input
    would have to hold the parameters. What depends on parameters alone, such as a cast or a transpose, is
    computed by each task that reads it: the weight is on the task's group, and nothing of the weight's size
    is kept or sent per microbatch.

    Args:
      index: the variable of the microbatch index.
      has_scalar_weights: whether floating-point scalars may be parameters, too, and not only settings such as
        a temperature.
    """
    states = {result.state for result in body.results}  # each belongs to one stage
    duplicates: dict[Var, Duplicate] = {}
    computed = makers_of(body.eqns)
    for eqn in body.eqns:
        reads = list(operands(eqn))
        if not is_cheap(eqn) or any(var in states for var in reads):
            continue
        if any(var in computed and var not in duplicates for var in reads):
            continue
        known = [duplicates[var] for var in reads if var in duplicates]
        outside = [var for var in reads if var not in duplicates and var != index]
        of_microbatch = index in reads or any(duplicate.of_microbatch for duplicate in known)
        weights = frozenset().union(*(duplicate.weights for duplicate in known))
        takes_slice = of_microbatch and _takes_slice(eqn, duplicates)
        if not takes_slice:
            weights |= {var for var in outside if is_weight(var, has_scalar_weights)}
        if weights and (of_microbatch or has_reduction(eqn)):
            continue
        trivial = takes_slice or not of_microbatch or all(size(var) == 1 for var in reads)
        trivial |= is_renamed(eqn) and not any(duplicate.once_per_stage for duplicate in known)
        duplicate = Duplicate(of_microbatch, weights, not trivial or draws_random_bits(eqn))
        duplicates.update(dict.fromkeys(eqn.outvars, duplicate))
    return duplicates


def is_weight(var: Atom, has_scalar_weights: bool = False) -> bool:
    """Whether an outer value may be a parameter: floating-point, and an array or ``has_scalar_weights``."""
    return (has_scalar_weights or size(var) > 1) and is_inexact(var)


def _takes_slice(eqn: JaxprEqn, duplicates: Mapping[Var, Duplicate]) -> bool:
    """Whether this is where a microbatch is taken out of a loop constant: one array, the rest scalars."""
    arrays = [var for var in operands(eqn) if size(var) > 1]
    return len(arrays) == 1 and arrays[0] not in duplicates and size(eqn.outvars[0]) < size(arrays[0])


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
    for eqn in reversed(body.eqns):
        works = set().union(*(readers.get(var, ()) for var in eqn.outvars))
        if works and duplicates[eqn.outvars[0]].once_per_stage:
            latest_first = sorted(works, key=order.position, reverse=True)
            works = {*{work.stage: work for work in latest_first}.values()}  # the first work of each stage
        for work in works:
            copied.setdefault(work, []).append(eqn)
            add_reader(work, eqn)
    return {work: (*reversed(copied.get(work, ())), *eqns[work]) for work in sorted(eqns, key=order.position)}
