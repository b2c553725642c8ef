"""Counts the stages of a step, before there is a schedule with as many."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import AbstractMesh, AxisType

from mpmd.compiler.find_layers.auto_marks import auto_marks
from mpmd.compiler.jaxprs.equations import any_inside, operands, subjaxprs
from mpmd.compiler.jaxprs.marks import marks_in
from mpmd.compiler.trace.traced_within import traced_within_submesh
from mpmd.language.annotate import mark_of, mark_p
from mpmd.language.decisions import Decisions, decided
from mpmd.language.reduce import treduce_p
from mpmd.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a loop of a step.

    Attributes:
      count: the number of stages.
      are_written: whether the user has marked their ends, rather than ``mpmd.auto_marks``.
      num_microbatches: the number of microbatches of the loop.
      schedule: the schedule of the loop; ``None`` if it is open.
      decision_index: the index of the decisions under which the loop is traced.
      slices: the number of slices of a microbatch: the schedule's, or the number into which ``mpmd.slices``
        cuts a sequence. Each stage has a mark on each slice, so 1 means one mark for each stage.
    """

    count: int
    are_written: bool
    num_microbatches: int
    schedule: Schedule | None
    decision_index: int = 0
    slices: int = 1


ONE_DEVICE = AbstractMesh((1, 1, 1), ("data", "sequence", "model"), (AxisType.Auto,) * 3)
"""The mesh within which steps are traced, so that their specs may name the axes of any candidate."""

EACH_LAYER = Decisions(layers_per_stage=(), mark_layers=auto_marks)
"""Each layer that ``mpmd.auto_marks`` finds is a stage."""


def stages_of(
    step: Callable, args: tuple, kwargs: Mapping[str, Any] | None = None, decisions: Decisions = EACH_LAYER
) -> tuple[Stages, ...]:
    """Traces a step and counts the stages of each of its loops, in order.

    Args:
      step: static arguments are already bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.
      decisions: those under which it is traced. By default, stages that it leaves open are its layers.

    Raises: ``ValueError`` for marks that do not fit their scans.
    """
    cuts = set[int]()
    traced = decided(step, decisions, slices=cuts)
    closed, _ = traced_within_submesh(traced, args, dict(kwargs or {}), [ONE_DEVICE], None)
    return tuple(_of_loop(loop, cuts) for loop in _loops(closed.jaxpr))


def _of_loop(loop: JaxprEqn, cuts: Iterable[int]) -> Stages:
    body: Jaxpr = loop.params["body"]
    ends = _longest_chain(body, _direction(body))
    written = any(not mark.boundary.by_auto_marks for _, mark in marks_in(body))
    schedule = loop.params["schedule"]
    ends_with_mark = written and schedule is not None and schedule.num_stages == ends
    count, slices = ends if ends_with_mark else ends + 1, 1
    if written:
        sizes = [(count, cut) for cut in cuts]
        sizes += [(schedule.num_stages, schedule.slices)] if schedule else []
        count, slices = _stages_on_slices(body, sizes) or (count, 1)
    return Stages(
        count=count,
        are_written=written,
        num_microbatches=loop.params["length"],
        schedule=schedule,
        decision_index=loop.params["number"],
        slices=slices,
    )


def _stages_on_slices(body: Jaxpr, sizes: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """The numbers of stages and of several slices for which there are as many marks; ``None``: there are not.

    All stages but the last have a mark on each slice, and perhaps the last one has, too.

    Args:
      sizes: numbers of stages with numbers of slices.
    """
    ends = sum(_num_ends(eqn, _direction(body)) for eqn in body.eqns)
    fitting = (
        (stages, slices)
        for stages, slices in sizes
        if stages > 1 and slices > 1 and ends in (slices * (stages - 1), slices * stages)
    )
    return max(fitting, default=None)


def _loops(jaxpr: Jaxpr) -> list[JaxprEqn]:
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive is treduce_p]
    for eqn in jaxpr.eqns:
        if eqn.primitive is not treduce_p:
            loops += [loop for inner in subjaxprs(eqn) for loop in _loops(inner)]
    return loops


def _direction(body: Jaxpr) -> bool:
    """Whether the marks that end stages point forward (``Mark.forward``); false if the user has
    transposed every mark."""
    return any(mark.forward for _, mark in marks_in(body) if not mark.linear)


def _longest_chain(body: Jaxpr, forward: bool) -> int:
    """The number of ends of stages that stand one behind the other.

    Args:
      forward: ``Mark.forward`` of the marks that end stages.

    Marks that ``auto_marks`` makes are in the order in which they stand, whatever depends on whatever: an
    iteration of a second tower does not read what the first one has made.
    """
    passed: dict[Var, int] = {}
    longest = of_auto_marks = 0
    for eqn in body.eqns:
        ends = _ends(eqn, forward)
        of_auto_marks += ends if any(mark.boundary.by_auto_marks for _, mark in _marks(eqn)) else 0
        before = max((passed.get(var, 0) for var in operands(eqn)), default=0)
        longest = max(longest, before + ends)
        passed.update(dict.fromkeys(eqn.outvars, before + ends))
    return max(longest, of_auto_marks)


def _marks(eqn: JaxprEqn) -> list:
    mark = mark_of(eqn)
    return [(eqn, mark)] if mark else [pair for inner in subjaxprs(eqn) for pair in marks_in(inner)]


def _num_ends(eqn: JaxprEqn, forward: bool) -> int:
    """The number of all ends of stages in an equation."""
    if mark_of(eqn) is not None or eqn.primitive.name == "scan":
        return _ends(eqn, forward)
    return sum(_num_ends(member, forward) for inner in subjaxprs(eqn) for member in inner.eqns)


def _ends(eqn: JaxprEqn, forward: bool) -> int:
    """The number of ends of stages, marked by the user or by ``auto_marks``, in an equation."""
    mark = mark_of(eqn)
    if mark is not None:
        return int(mark.forward is forward and not mark.linear)
    if not any_inside(eqn, mark_p):
        return 0
    if eqn.primitive.name == "scan":
        return 0
    return sum(_longest_chain(inner, forward) for inner in subjaxprs(eqn))
