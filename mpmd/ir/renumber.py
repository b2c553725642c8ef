"""Renumbers the groups of a plan, between the numbers in a part of a mesh and in the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from mpmd.ir.part import Part
from mpmd.ir.plan import (
    ConstantLeaf,
    GroupProgram,
    InputLeaf,
    Instruction,
    OutputLeaf,
    Plan,
    Recv,
    Send,
    Submesh,
)

AnyLeaf = TypeVar("AnyLeaf", InputLeaf, ConstantLeaf, OutputLeaf)


def renumbered(
    plan: Plan, numbers: Mapping[int, int], submeshes: Sequence[Submesh], part: Part | None = None
) -> Plan:
    """The plan with other numbers of groups.

    Args:
      numbers: the new number of each group with instructions, by its number in the plan.
      submeshes: the submesh of each group, by new number. A group that is not in the plan does nothing.
      part: the part of the mesh that the new plan is for; ``None``: the whole mesh.
    """

    def instruction(old: Instruction) -> Instruction:
        match old:
            case Send():
                return dataclasses.replace(old, dst=numbers[old.dst])
            case Recv():
                return dataclasses.replace(old, src=numbers[old.src])
        return old

    def leaf(old: AnyLeaf) -> AnyLeaf:
        return dataclasses.replace(old, mpmd_idxs=tuple(numbers[group] for group in old.mpmd_idxs))

    lost = [p.mpmd_idx for p in plan.programs if p.instructions and p.mpmd_idx not in numbers]
    assert not lost, f"groups {lost} have programs and no new numbers"
    programs: list[tuple[Instruction, ...]] = [()] * len(submeshes)
    for program in plan.programs:
        if program.mpmd_idx in numbers:
            programs[numbers[program.mpmd_idx]] = tuple(map(instruction, program.instructions))
    return dataclasses.replace(
        plan,
        programs=tuple(GroupProgram(group, instructions) for group, instructions in enumerate(programs)),
        inputs=tuple(map(leaf, plan.inputs)),
        constants=tuple(map(leaf, plan.constants)),
        outputs=tuple(map(leaf, plan.outputs)),
        submeshes=tuple(submeshes),
        part=part,
    )
