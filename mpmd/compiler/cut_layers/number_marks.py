"""Writes into each mark of the loop the number of the stage that it ends."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.cut_layers.backward_values import backward_value
from mpmd.compiler.cut_layers.slice_marks import stages_on_slices, wrong_marks
from mpmd.compiler.jaxprs.equations import operands
from mpmd.compiler.jaxprs.source import line_of, where
from mpmd.compiler.steps import Loop
from mpmd.errors import CompileError
from mpmd.language.annotate import Boundary, Mark, mark_of, mark_text
from mpmd.schedules import Interleaved1F1B, ListSchedule, Schedule
from mpmd.schedules.base import AnyPlacement, RoundRobin
from mpmd.schedules.check import counted

Ends = Sequence[tuple[JaxprEqn, Mark]]


@dataclasses.dataclass(frozen=True)
class MarkedStages:
    """The stages that the marks of a loop end, where no schedule says how many there are.

    Attributes:
      count: the number of stages.
      are_written: whether the user has marked their ends, rather than ``mpmd.auto_marks``.
      slices: the number of slices of a microbatch. Each stage has a mark on each slice, so 1 means one mark
        for each stage.
    """

    count: int
    are_written: bool
    slices: int


def count_stages(loop: Loop, written: Schedule | None, slices: Iterable[int]) -> MarkedStages:
    """Counts the stages of a loop as ``number_marks`` numbers them.

    Marks that ``auto_marks`` makes end stages in the order in which they stand: an iteration of a second
    tower does not read what the first one has made.

    Args:
      written: the schedule in the step. A mark after its last stage ends no further stage.
      slices: the numbers into which the step cuts sequences.
    """
    ends = _ends(loop)
    are_written = any(not mark.boundary.by_auto_marks for _, mark in loop.marks)
    depth = max(_depths(loop), default=-1) + 1
    depth = max(depth, sum(mark.boundary.by_auto_marks for _, mark in ends))
    is_last_marked = are_written and written is not None and written.num_stages == depth
    count = depth if is_last_marked else depth + 1
    sizes = {(count, number) for number in slices}
    sizes |= {(written.num_stages, written.slices)} if written else set()
    on_slices = [
        (stages, number)
        for stages, number in sizes
        if stages > 1 and number > 1 and len(ends) in (number * (stages - 1), number * stages)
    ]
    count, number = max(on_slices, default=(count, 1)) if are_written else (count, 1)
    return MarkedStages(count, are_written, number)


def number_marks(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Numbers the marks of each loop whose marks end as many stages as its schedule has.

    A mark ends the stage after the stages of the marks that it depends on. So models that do not depend on
    one another, such as an actor and a critic, pass the same stages, each with marks of its own. If this
    numbering has too few stages, as for branches that are to be a stage each, the marks end stages in the
    order in which they were written.

    This comes before dead code is removed: when the loss is computed before the last stage, the marks of
    the later stages are dead code.
    """
    numbered = ((loop, _stages(loop)) for loop in loops)
    return tuple(loop if stages is None else _numbered(loop, stages) for loop, stages in numbered)


def number_live_marks(loops: Sequence[Loop], before: Sequence[Loop]) -> tuple[Loop, ...]:
    """The loops without dead code, with numbers in their marks. Stages are numbered through all loops.

    Args:
      before: the loops after ``number_marks``, with dead code.

    Raises: ``CompileError`` naming every loop whose marks do not make as many stages as its schedule has.
    """
    had_stages = {loop.index: _stages(loop) is not None for loop in before}
    faults: list[str] = []
    numbered: list[Loop] = []
    for loop in loops:
        stages = _stages(loop)
        if stages is not None and not _has_orphans(loop):
            loop = _numbered(loop, stages)
        elif not had_stages[loop.index]:
            faults.append(_wrong_number_of_marks(loop))
        numbered.append(loop)
    if faults:
        raise CompileError(faults)
    sizes = (len(loop.stages) for loop in numbered)
    return tuple(map(_with_first_stage, numbered, itertools.accumulate(sizes, initial=0)))


def _with_first_stage(loop: Loop, first_stage: int) -> Loop:
    if not first_stage:
        return loop
    boundaries = {
        mark.boundary: Boundary(
            mark.boundary.name, first_stage + mark.boundary.stage, ends=mark.boundary.ends
        )
        for _, mark in loop.marks
        if mark.boundary.stage is not None
    }
    boundary_of = {id(eqn): boundaries[mark.boundary] for eqn, mark in loop.marks}
    return dataclasses.replace(_with_boundaries(loop, boundary_of), first_stage=first_stage)


def _with_boundaries(loop: Loop, boundary_of: Mapping[int, Boundary]) -> Loop:
    """Replaces the boundary of each mark, by the identity of the mark's equation."""
    eqns = tuple(
        eqn.replace(params={**eqn.params, "boundary": boundary_of[id(eqn)]}) if mark_of(eqn) else eqn
        for eqn in loop.eqns
    )
    return dataclasses.replace(loop, eqns=eqns)


def _ends(loop: Loop) -> list[tuple[JaxprEqn, Mark]]:
    """The marks that the user wrote, which end stages, without marks that differentiation derived."""
    return [(eqn, mark) for eqn, mark in loop.marks if not mark.linear]


def _has_orphans(loop: Loop) -> bool:
    """Whether what a mark returns is dead code, but derivatives through it are not, as of a penalty."""
    return not {mark.boundary for _, mark in loop.marks} <= {mark.boundary for _, mark in _ends(loop)}


def _stages(loop: Loop) -> Sequence[int] | None:
    """The stage that each of the user's marks ends.

    There is one between each two stages, and perhaps one after the last stage; ``None`` if not.
    """
    num_stages = loop.schedule.num_stages
    depths = _depths(loop)
    if loop.schedule.slices > 1:
        return stages_on_slices(depths, loop.schedule.numbers)
    for stages in (depths, range(len(depths))):
        most = max(stages, default=-1) + 1
        if most in (num_stages - 1, num_stages):
            return stages
    return None


def _depths(loop: Loop) -> list[int]:
    passed = _marks_passed(loop)
    return [passed[eqn.outvars[0]] - 1 for eqn, _ in _ends(loop)]


def _marks_passed(loop: Loop) -> dict[Var, int]:
    """For each value that the loop makes, the length of the longest chain of the user's marks before it."""
    passed: dict[Var, int] = {}
    for eqn in loop.eqns:
        before = max((passed.get(var, 0) for var in operands(eqn)), default=0)
        is_end = (mark := mark_of(eqn)) is not None and not mark.linear
        passed.update(dict.fromkeys(eqn.outvars, before + is_end))
    return passed


def _numbered(loop: Loop, stages: Sequence[int]) -> Loop:
    ends: dict[Boundary, list[Boundary]] = collections.defaultdict(list)
    for (_, mark), stage in zip(_ends(loop), stages, strict=True):
        ends[mark.boundary].append(Boundary(mark.boundary.name, stage, ends=mark.boundary.ends))
    marks = loop.marks
    end_of = {
        id(eqn): end
        for boundary in ends
        for eqn, end in _ends_at([each for each in marks if each[1].boundary is boundary], ends[boundary])
    }
    return _with_boundaries(loop, end_of)


def _ends_at(marks: Ends, ends: Sequence[Boundary]) -> Iterator[tuple[JaxprEqn, Boundary]]:
    """The marks of one boundary, each with the end of the user's mark that it is, or accompanies.

    A function under ``jit`` that is called for several stages brings the same boundary several times.
    Differentiation goes through those calls in the same order forwards, and in reverse backwards.

    Args:
      ends: of the user's marks of this boundary.
    """
    by_user = [eqn for eqn, mark in marks if not mark.linear]
    tangents = [eqn for eqn, mark in marks if mark.forward and mark.linear]
    cotangents = [eqn for eqn, mark in marks if not mark.forward]
    yield from zip(by_user, ends, strict=True)
    yield from zip(tangents, itertools.cycle(ends), strict=False)
    yield from zip(cotangents, itertools.cycle(reversed(ends)), strict=False)


def _wrong_number_of_marks(loop: Loop) -> str:
    ends, schedule = _ends(loop), loop.schedule
    stages = _depths(loop)
    marked, num_stages = max(stages, default=-1) + 1, schedule.num_stages
    if schedule.slices > 1:
        return _wrong_marks_of_slices(loop, stages, ends)
    more = (
        f"; for {counted(marked, 'stage')} on {counted(schedule.mpmd_dim, 'group')}, as where calls of a "
        f"network feed one another, use {_with_stages(schedule, marked)}"
    )
    remedy = "" if ends else _without_marks(num_stages)
    if _are_in_one_scan(ends):
        remedy = f", which mark_stage_end(..., num_stages={num_stages}) in the scan gives"
    return (
        f"the function that treduce at {loop.where} applies has {_ends_found(ends, marked)}, but the "
        f"schedule {schedule} has {counted(num_stages, 'stage')}: it needs "
        f"{counted(num_stages - 1, 'mark')}, or {num_stages} with one after the last stage{remedy}"
        f"{more if marked > num_stages else ''}.{_lines(stages, ends)}"
    )


def _wrong_marks_of_slices(loop: Loop, stages: Sequence[int], ends: Ends) -> str:
    schedule = loop.schedule
    needed, marked = schedule.slices * (schedule.num_stages - 1), max(stages, default=-1) + 1
    places = [_place(*end) for end in ends]
    chosen = any(mark.boundary.by_auto_marks for _, mark in ends)
    if (handed_back := backward_value(loop, [eqn for eqn, _ in ends], _marks_passed(loop))) is not None:
        return handed_back
    return (
        f"the function that treduce at {loop.where} applies has {_ends_found(ends, marked)}, but the "
        f"schedule {schedule} has {counted(schedule.num_stages, 'stage')} on {schedule.slices} slices: it "
        f"needs {counted(needed, 'mark')}, {schedule.num_stages - 1} in each slice"
        f"{wrong_marks(stages, places, schedule.numbers, _are_in_one_scan(ends), chosen)}."
        f"{_lines(stages, ends)}"
    )


def _ends_found(ends: Ends, stages: int) -> str:
    if not ends:
        return "no call of mark_stage_end whose result it uses"
    if any(mark.boundary.in_scan for _, mark in ends):
        return f"marks that end {counted(stages, 'stage')}"
    which = "which ends" if len(ends) == 1 else "which end"
    return f"{counted(len(ends), 'call')} of mark_stage_end, {which} {counted(stages, 'stage')}"


def _without_marks(num_stages: int) -> str:
    return (
        f"; mpmd.auto_marks(loss_fn, num_stages={num_stages}) of the function that is differentiated cuts it "
        "between layers, and so does mpmd.value_and_grad, which cuts the batch as well"
    )


def _are_in_one_scan(ends: Ends) -> bool:
    return all(mark.boundary.in_scan for _, mark in ends) and len({_place(*end) for end in ends}) == 1


def _lines(stages: Sequence[int], ends: Ends) -> str:
    lines = []
    pairs = zip(stages, (_place(*end) for end in ends), strict=True)
    for place, group in itertools.groupby(pairs, key=lambda pair: pair[1]):
        numbers = [stage for stage, _ in group]
        first, last = min(numbers), max(numbers)
        which = f"stage {first} ends" if first == last else f"stages {first} to {last} end"
        lines.append(f"\n  {which} at {place}")
    return "".join(lines)


def _with_stages(schedule: Schedule, ends: int) -> str:
    """A schedule for the same number of groups and for stages with ``ends`` ends, as text.

    The schedule places stages round robin, so the next call of a network runs on the groups that hold its
    weights.
    """
    fits_others = isinstance(schedule, RoundRobin | AnyPlacement)
    family = schedule.name if fits_others else Interleaved1F1B.__name__
    even = (stages for stages in (ends, ends + 1) if stages % schedule.mpmd_dim == 0)
    if (stages := next(even, None)) is None:
        family, stages = ListSchedule.__name__, ends + 1
    return f"{family}(num_stages={stages}, mpmd_dim={schedule.mpmd_dim})"


def _place(eqn: JaxprEqn, mark: Mark) -> str:
    if mark.boundary.by_auto_marks:
        return mark_text(eqn, line_of(eqn))
    name = mark.boundary.name
    return f"{where(eqn)}: {name!r}" if name else where(eqn)
