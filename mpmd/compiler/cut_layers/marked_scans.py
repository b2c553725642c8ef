"""Reads a scan with marks in its body: after which iterations which stages end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import (
    Atom,
    any_inside,
    closed,
    operands,
    subjaxprs,
)
from mpmd.compiler.jaxprs.marks import marks_in, without_marks
from mpmd.compiler.jaxprs.scans import ScanOperands, scan_operands
from mpmd.compiler.jaxprs.source import where
from mpmd.language.annotate import Boundary, mark_of, mark_p


@dataclasses.dataclass(frozen=True)
class Marks:
    """The ends of stages that the marks in the body of a scan make.

    Attributes:
      eqn: one of them, of the boundary that the others share.
      forward, linear: the direction of those to put between the parts of the scan. A body with a mark
        backward is transposed; marks forward in there accompany what it computes again, and end nothing.
      carried: the positions, among what is carried, of what they are to mark.
      ends: where stages end, among what is scanned over, by the number of the end.
    """

    eqn: JaxprEqn
    boundary: Boundary
    forward: bool
    linear: bool
    carried: tuple[int, ...]
    ends: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """A scan that is to be cut into one for each part of what it scans over.

    Attributes:
      eqn: the scan.
      operands: which of its operands are what.
      body: without marks.
      marks: ``None`` of a scan without marks over values that another scan has cut.
      added_to: which of the carried values are only added to, such as the gradient of a weight that all
        layers share. Each part sums its own, and the sums are added.
      unchanged: which are the same in all iterations.
      passed_on: for carried values that are just an element of what is scanned over, which one. So it is
        where values of the forward were kept for what is computed again; they need no scan before theirs.
    """

    eqn: JaxprEqn
    operands: ScanOperands
    body: ClosedJaxpr
    marks: Marks | None
    added_to: frozenset[int]
    unchanged: frozenset[int]
    passed_on: Mapping[int, int]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    @property
    def stacked(self) -> list[Atom]:
        """The arrays that it scans over, and those that it stacks."""
        return [*self.eqn.invars[self.operands.xs], *self.eqn.outvars[self.operands.num_carry :]]


def read_scan(eqn: JaxprEqn) -> LayerScan:
    """Reads a scan and its marks. Raises ``ValueError`` for marks that do not fit it."""
    jaxpr: Jaxpr = eqn.params["jaxpr"].jaxpr
    roles = scan_operands(eqn)
    before = jaxpr.invars[roles.carry]
    xs = {var: i for i, var in enumerate(jaxpr.invars[roles.xs])}
    bare = without_marks(jaxpr)
    added_to = frozenset(i for i, var in enumerate(before) if _is_only_added_to(bare, var, bare.outvars[i]))
    after = bare.outvars[: roles.num_carry]
    marks = _read_marks(eqn, roles, added_to) if any_inside(eqn, mark_p) else None
    return LayerScan(
        eqn=eqn,
        operands=roles,
        body=closed(bare),
        marks=marks,
        added_to=added_to,
        unchanged=frozenset(i for i, var in enumerate(before) if bare.outvars[i] is var),
        passed_on={i: xs[atom] for i, atom in enumerate(after) if isinstance(atom, Var) and atom in xs},
    )


def _read_marks(eqn: JaxprEqn, roles: ScanOperands, added_to: frozenset[int]) -> Marks:
    jaxpr: Jaxpr = eqn.params["jaxpr"].jaxpr
    marks = list(marks_in(jaxpr))
    backward = [(member, mark) for member, mark in marks if not mark.forward]
    by_user = [(member, mark) for member, mark in marks if mark.forward and not mark.linear]
    member, mark = (backward or by_user or marks)[0]
    others = {other.boundary for _, other in (backward or by_user or marks)} - {mark.boundary}
    if others:
        # A derivative has the marks of its function in another order; what is said twice is shown once.
        lines = ", ".join(sorted({where(one) for one, _ in marks}))
        raise ValueError(
            f"the scan at {where(eqn)} has several marks in its body, at {lines}: a stage ends after a whole "
            "iteration, so leave one of them"
        )
    forward = not backward
    if forward:
        reached = _behind_marks(jaxpr)
        outs = jaxpr.outvars[: roles.num_carry]
        carried = [i for i, atom in enumerate(outs) if isinstance(atom, Var) and atom in reached]
        if by_user and not carried:
            raise ValueError(_not_carried(where(member), has_carry=bool(outs)))
    else:
        needed = _before_marks(jaxpr)
        carried = [i for i, var in enumerate(jaxpr.invars[roles.carry]) if var in needed]
    length = eqn.params["length"]
    counts = iterations_of(mark.boundary, length, where(member))
    ends = {end: number for number, end in enumerate(itertools.accumulate(counts))}
    if eqn.params["reverse"] == forward:  # the layers are applied from the last one to the first one
        ends = {length - end: number for end, number in ends.items()}
    return Marks(
        eqn=member,
        boundary=mark.boundary,
        forward=forward,
        linear=mark.linear,
        carried=tuple(i for i in carried if i not in added_to),
        ends=ends,
    )


def _not_carried(line: str, has_carry: bool) -> str:
    """The fault of a mark whose result its scan does not carry, and the remedy."""
    if has_carry:
        return (
            f"mark_stage_end at {line} is in a scan that does not carry what it returns to the next "
            "iteration, so no stage can end there: mark what the scan carries, and return it as the carry"
        )
    return (
        f"mark_stage_end at {line} is in a scan that carries nothing, such as jax.lax.map: its iterations do "
        "not follow one another as stages do. To divide into stages what is done for each element, call "
        "jax.vmap instead of jax.lax.map; for layers that follow one another, use jax.lax.scan, mark what "
        "one hands to the next, and return it as the carry"
    )


def iterations_of(boundary: Boundary, length: int, line: str) -> tuple[int, ...]:
    """The number of iterations of each stage that ends in a scan.

    Raises: ``ValueError`` when they are not those of the scan.
    """
    at = f"mark_stage_end at {line} is in a scan of {length} iterations"
    if boundary.num_stages is not None:
        few, more = divmod(length, boundary.num_stages)
        if not few:
            raise ValueError(
                f"{at}, which cannot be divided into num_stages={boundary.num_stages}: each stage has one "
                "at least"
            )
        return (few + 1,) * more + (few,) * (boundary.num_stages - more)
    every = 1 if boundary.every is None else boundary.every
    if isinstance(every, int):
        if length % every:
            few = max(length // every, 1)
            raise ValueError(
                f"{at}, which every={every} does not divide: give the iterations of each stage, such as "
                f"every={_divided(length, few)}, or num_stages={few}"
            )
        return (every,) * (length // every)
    if boundary.has_rest:
        assert sum(every) < length, f"{at}, of which {every} leave none"
    elif sum(every) != length:
        raise ValueError(
            f"{at}, but every={every} has {sum(every)}: give the numbers of all stages, which add up to "
            f"{length}"
        )
    return every


def _divided(length: int, stages: int) -> tuple[int, ...]:
    few, more = divmod(length, stages)
    return (few + 1,) * more + (few,) * (stages - more)


def _behind_marks(jaxpr: Jaxpr) -> set[Var]:
    """The variables that depend on the result of a mark."""
    reached: set[Var] = set()
    for eqn in jaxpr.eqns:
        is_mark = mark_of(eqn) is not None or any_inside(eqn, mark_p)
        if is_mark or any(var in reached for var in operands(eqn)):
            reached.update(eqn.outvars)
    return reached


def _before_marks(jaxpr: Jaxpr) -> set[Var]:
    """The variables that backward marks depend on."""
    needed: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        mark = mark_of(eqn)
        inside = [mark] if mark else [inner for sub in subjaxprs(eqn) for _, inner in marks_in(sub)]
        if any(not one.forward for one in inside) or any(var in needed for var in eqn.outvars):
            needed.update(operands(eqn))
    return needed


def _is_only_added_to(jaxpr: Jaxpr, before: Var, after: Atom) -> bool:
    """Whether ``after`` is ``before`` and summands, and nothing else reads ``before`` or a sum in between."""
    read = [var for eqn in jaxpr.eqns for var in operands(eqn)] + list(jaxpr.outvars)
    reader = {var: eqn for eqn in jaxpr.eqns for var in operands(eqn)}
    var = before
    while read.count(var) == 1 and var in reader:
        eqn = reader[var]
        if eqn.primitive.name not in ("add", "add_any"):
            return False
        var = eqn.outvars[0]
    return var is after and var is not before and read.count(var) == 1
