"""Chooses the group of each stage: the group that runs the stage in the loop's schedule.

A loop that names a part of the mesh uses the groups of this part. The stages of a later loop that names no
part may all move on by the same number of groups, to groups that already hold more of the values that they
read.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import Var
from jax.sharding import AbstractMesh

from mpmd.compiler.graph import GroupSet, TaskGraph
from mpmd.compiler.jaxprs.equations import operands, size
from mpmd.compiler.jaxprs.work import nbytes
from mpmd.compiler.steps import CutStep, Loop
from mpmd.errors import CompileError


def place_stages(
    graph: TaskGraph, submeshes: Sequence[AbstractMesh], parts: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Returns the group of each stage of all loops; empty without a loop.

    The first schedule's groups are the mesh's, in their order. A later loop's are the same, unless its stages
    find more bytes of the values that they read on their groups if all stages move on by some number of
    groups. So a discriminator that is trained alone, and then behind a generator, stays on its groups. Where
    submeshes differ, the user has chosen what runs on which.

    Args:
      parts: the groups of each part of the mesh, by its name.

    Raises: ``CompileError`` naming all loops whose schedules need more groups than there are, or that name a
      part which the mesh does not have.
    """
    _check_sizes(graph.step, len(submeshes), parts)
    placed: dict[int, int] = {}
    for loop, tasks in zip(graph.step.loops, graph.tasks, strict=True):
        rows = {task.stage: row for row, cells in enumerate(tasks) for c in cells for task in c.tasks}
        if loop.part is not None:
            placed |= {stage: parts[loop.part][row] for stage, row in rows.items()}
            continue
        shift = 0
        if placed and len(set(submeshes)) == 1:
            shift = _best_shift(graph, placed, rows, len(submeshes))
        placed |= {stage: (row + shift) % len(submeshes) for stage, row in rows.items()}
    return tuple(placed[stage] for stage in sorted(placed))


def _check_sizes(step: CutStep, mpmd_dim: int, parts: Mapping[str, Sequence[int]]) -> None:
    faults: list[str] = []
    for loop in step.loops:
        schedule = loop.schedule
        if loop.part is not None:
            faults += _faults_of_part(loop, loop.part, parts)
        elif schedule.mpmd_dim > mpmd_dim:
            others = ", ".join(
                f"{other.schedule.mpmd_dim} at {other.where}" for other in step.loops if other is not loop
            )
            same = f"; all loops run on the same groups (other loops take {others})" if others else ""
            faults.append(
                f"the schedule {schedule} of treduce at {loop.where} runs on {schedule.mpmd_dim} groups, but "
                f"the mesh has {mpmd_dim}{same}; give it as many groups (where JAX has too few devices, "
                f"JAX_NUM_CPU_DEVICES={schedule.mpmd_dim} in the environment makes that many of a CPU), or "
                "put several stages on a group with "
                f"ListSchedule(num_stages={schedule.num_stages}, mpmd_dim={mpmd_dim})"
            )
    if faults:
        raise CompileError(faults)


def _faults_of_part(loop: Loop, name: str, parts: Mapping[str, Sequence[int]]) -> Iterator[str]:
    if name not in parts:
        names = ", ".join(map(repr, parts)) or "none"
        yield (
            f"the treduce at {loop.where} is to run on the part {name!r}, but the step is compiled for a "
            f"mesh with the parts {names}: compile it for a whole mesh that has the part, or leave out "
            f"part={name!r}"
        )
    elif loop.schedule.mpmd_dim > (size := len(parts[name])):
        yield (
            f"the schedule {loop.schedule} of treduce at {loop.where} runs on {loop.schedule.mpmd_dim} "
            f"groups, but the part {name!r} has {size}"
        )


def _best_shift(graph: TaskGraph, placed: Mapping[int, int], rows: Mapping[int, int], mpmd_dim: int) -> int:
    """By how many groups a loop's stages move on, so that as many bytes as possible need not move.

    Args:
      placed: the groups of the stages of the loops before.
      rows: for each stage of the loop, the group that its schedule has it on.
    """
    held = _held(graph, placed)
    reads = {(var, rows[m.work.stage]) for m in graph.stage_work if m.work.stage in rows for var in m.reads}
    there: collections.Counter[int] = collections.Counter()
    for var, row in reads:
        for group in held.get(var, ()):
            there[(group - row) % mpmd_dim] += nbytes(var)
    most = max(there.values(), default=0)
    return min((shift for shift, count in there.items() if count == most), default=0)


def _held(graph: TaskGraph, placed: Mapping[int, int]) -> dict[Var, GroupSet]:
    """Returns the groups of state, accumulated values, and equal-sized values that are computed from these.

    Only loops that are already placed count. The batch has no group: the caller sends it wherever it is read.
    """
    step = graph.step
    state = {step.arguments[argument].var for argument, _ in step.fed_back}
    state |= step.constants.keys()
    held: dict[Var, GroupSet] = collections.defaultdict(frozenset)
    for member in graph.stage_work:
        for var in state.intersection(member.reads) if member.work.stage in placed else ():
            if size(var) > 1:
                held[var] |= {placed[member.work.stage]}
    for a in graph.accumulators:
        if a.work.stage in placed and size(a.result) > 1:
            held[a.result] |= {placed[a.work.stage]}
    for eqn in graph.outer:
        for var in eqn.outvars:
            alike = [held[other] for other in operands(eqn) if other in held and size(other) == size(var)]
            if alike:
                held[var] |= frozenset.intersection(*alike) or alike[0]
    return held
