"""Converts the numbers of a part's groups to the numbers of the mesh's groups, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mpmd.arguments.call import Call
from mpmd.ir.part import Part
from mpmd.ir.placement import Placement
from mpmd.ir.process_times import RecordedStep
from mpmd.ir.renumber import renumbered
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.meshes.part import PartMesh
from mpmd.program import Program
from mpmd.runtime.protocol import LoadedProgram, Runtime
from mpmd.util.tables import first_few


def placements_in(mesh: GroupMesh, call: Call, runtime: Runtime) -> tuple[Placement, ...]:
    """The placement of each leaf of a call, by the numbers that the groups have in ``mesh``.

    Raises: ``ValueError`` naming the leaves with a layer range that no group of the part holds.
    """
    placements, numbers = call.placements(runtime), mesh.numbers
    elsewhere = [
        path
        for path, placement in zip(call.paths, placements, strict=True)
        if placement.mpmd_idxs and not all(numbers.keys() & set(held.mpmd_idxs) for held in placement.ranges)
    ]
    if elsewhere:
        raise ValueError(
            f"{first_few(elsewhere)}: held by groups outside of the part {mesh.part_name!r}, for which the "
            "step is compiled; mpmd.reshard(array, to=step) copies arrays to the groups that read them"
        )

    def numbered(mpmd_idxs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(numbers[group] for group in mpmd_idxs if group in numbers)

    return tuple(
        dataclasses.replace(
            placement,
            mpmd_idxs=numbered(placement.mpmd_idxs),
            range_idxs=tuple(map(numbered, placement.range_idxs)),
        )
        for placement in placements
    )


def check_in_part(mesh: GroupMesh, call: Call, runtime: Runtime) -> None:
    if isinstance(mesh, PartMesh):
        placements_in(mesh, call, runtime)


def peaks_in(mesh: GroupMesh, peaks: Sequence[int | None]) -> tuple[int | None, ...]:
    return tuple(peaks[group] for group in mesh.mpmd_idxs)


def program_of_whole(program: Program, mesh: GroupMesh) -> Program:
    if not isinstance(mesh, PartMesh):  # the plan may have been made for a part of another mesh
        return of_part(program, mesh)
    return _renumbered(program, dict(enumerate(mesh.mpmd_idxs)), mesh.whole)


def loaded_in(loaded: LoadedProgram, mesh: GroupMesh) -> LoadedProgram:
    if not isinstance(mesh, PartMesh):
        return loaded
    numbers, holdings = mesh.numbers, loaded.holdings
    return dataclasses.replace(
        loaded,
        program=_renumbered(loaded.program, numbers, mesh),
        # A step that needs no group is answered by one that may be of another part.
        replies={numbers[i]: reply for i, reply in loaded.replies.items() if i in numbers},
        holdings={
            (numbers[src], numbers[dst]): holdings[src, dst]
            for src, dst in holdings
            if src in numbers and dst in numbers
        },
    )


def of_part(program: Program, mesh: GroupMesh) -> Program:
    if (part := _part(mesh)) == program.plan.part:
        return program
    return dataclasses.replace(program, plan=dataclasses.replace(program.plan, part=part))


def times_in(mesh: GroupMesh, steps: Sequence[RecordedStep]) -> tuple[RecordedStep, ...]:
    return tuple(
        dataclasses.replace(
            step, processes=tuple(of_process.renumbered(mesh.numbers) for of_process in step.processes)
        )
        for step in steps
    )


def _part(mesh: GroupMesh) -> Part | None:
    return None if mesh.part_name is None else Part(mesh.part_name, mesh.mpmd_idxs)


def _renumbered(program: Program, numbers: Mapping[int, int], mesh: GroupMesh) -> Program:
    submeshes = [tuple(submesh.shape.items()) for submesh in mesh.abstract_submeshes]
    plan = renumbered(program.plan, numbers, submeshes, _part(mesh))
    jaxprs = {(numbers[group], task): jaxpr for (group, task), jaxpr in program.jaxprs.items()}
    return dataclasses.replace(program, plan=plan, jaxprs=jaxprs)
