"""Resolves the specs that a plan leaves open, by having the groups compile."""

from __future__ import annotations

import collections
import dataclasses

from mpmd.ir.names import resharded_name
from mpmd.ir.plan import Executable, GroupProgram, Instruction, Run
from mpmd.program import Program, Variant
from mpmd.runtime.choose_specs import ChosenSpecs, Compile, choose_specs


def resolve_specs(program: Program, compile: Compile) -> Program:
    """Returns the program with every spec of its plan known.

    An executable that reads differently sharded values becomes several. Every group has then compiled its
    executables. A plan without open specs, such as a plan for one-device groups, is returned unchanged,
    without compiling.
    """
    plan = program.plan
    if all(None not in (*e.in_specs, *e.out_specs) for e in plan.executables):
        return program
    return with_chosen_specs(program, choose_specs(program, compile))


def with_chosen_specs(program: Program, choice: ChosenSpecs) -> Program:
    """The program with the specs that compilers chose, and an executable for each variant that groups run."""
    plan = program.plan
    resolved: dict[Variant, Executable] = {}
    numbers: collections.Counter[str] = collections.Counter()
    for group in plan.programs:
        for run in group.runs:
            variant = choice.variants[group.mpmd_idx, run]
            if variant not in resolved:
                resolved[variant] = dataclasses.replace(
                    plan.executable(run.executable),
                    name=resharded_name(run.executable, numbers[run.executable]),
                    in_specs=variant[1],
                    out_specs=choice.out_specs[variant],
                )
                numbers[run.executable] += 1

    def renamed(instruction: Instruction, mpmd_idx: int) -> Instruction:
        if not isinstance(instruction, Run):
            return instruction
        return dataclasses.replace(
            instruction, executable=resolved[choice.variants[mpmd_idx, instruction]].name
        )

    resolved_plan = dataclasses.replace(
        plan,
        programs=tuple(
            GroupProgram(i, tuple(renamed(instruction, i) for instruction in group.instructions))
            for i, group in enumerate(plan.programs)
        ),
        executables=tuple(resolved.values()),
        outputs=tuple(
            dataclasses.replace(leaf, spec=choice.specs[leaf.mpmd_idxs[0], leaf.name])
            for leaf in plan.outputs
        ),
    )
    return dataclasses.replace(
        program,
        plan=resolved_plan,
        functions={e.name: program.functions[name] for (name, _), e in resolved.items()},
        compiled={e.name: variant for variant, e in resolved.items()},
    )
