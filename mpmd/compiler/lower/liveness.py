"""Frees every buffer after its last use, and donates buffers that an executable's results can take over."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from mpmd.ir.plan import Executable, Free, GroupProgram, Instruction, Name, Plan, Run, Send


def add_frees_and_donations(plan: Plan) -> Plan:
    """Returns the plan with donations in its executables and a ``Free`` after the last use of each value.

    An input is donated where it is used for the last time in every run of the executable, and a result of
    the same shape, dtype and spec can take its buffer; values that are sent keep theirs, as the message may
    still be on its way. The step's results, its constants, and arguments that are not donated are kept.
    """
    last_uses = [_last_uses(program, _kept(plan, program.mpmd_idx)) for program in plan.programs]
    dying = _dying_inputs(plan, last_uses)
    executables = {
        e.name: dataclasses.replace(e, donated=_donated(e, dying[e.name])) for e in plan.executables
    }
    programs = tuple(
        GroupProgram(program.mpmd_idx, _with_frees(program, last, executables))
        for program, last in zip(plan.programs, last_uses, strict=True)
    )
    return dataclasses.replace(plan, programs=programs, executables=tuple(executables.values()))


def _kept(plan: Plan, mpmd_idx: int) -> set[Name]:
    arguments = (leaf.name for leaf in plan.inputs_of(mpmd_idx).values() if leaf.name and not leaf.donated)
    constants = (leaf.name for leaf in plan.constants_of(mpmd_idx))
    results = (leaf.name for leaf in plan.outputs_of(mpmd_idx).values())
    return {*arguments, *constants, *results}


def _mentioned(instruction: Instruction) -> tuple[Name, ...]:
    if isinstance(instruction, Run):
        return (*instruction.outputs, *instruction.inputs)
    return instruction.values


def _last_uses(program: GroupProgram, kept: Collection[Name]) -> dict[int, tuple[Name, ...]]:
    last: dict[Name, int] = {}
    for position, instruction in enumerate(program.instructions):
        last.update(dict.fromkeys(_mentioned(instruction), position))
    dying: dict[int, list[Name]] = collections.defaultdict(list)
    for name, position in last.items():
        if name not in kept:
            dying[position].append(name)
    return {position: tuple(names) for position, names in dying.items()}


def _dying_inputs(plan: Plan, last_uses: Sequence[Mapping[int, tuple[Name, ...]]]) -> dict[str, list[int]]:
    """Maps each executable to the positions of inputs whose last use is the run, in every run."""
    dying = {e.name: list(range(len(e.inputs))) for e in plan.executables}
    for program, last in zip(plan.programs, last_uses, strict=True):
        sent = {name for i in program.instructions if isinstance(i, Send) for name in i.values}
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Run):
                inputs, free = instruction.inputs, set(last.get(position, ())) - sent
                dying[instruction.executable] = [
                    i
                    for i in dying[instruction.executable]
                    if inputs[i] in free and inputs.count(inputs[i]) == 1
                ]
    return dying


def _donated(executable: Executable, dying: Sequence[int]) -> tuple[int, ...]:
    results = collections.Counter(zip(executable.outputs, executable.out_specs, strict=True))
    donated = []
    for i in dying:
        buffer = (executable.inputs[i], executable.in_specs[i])
        if results[buffer] and executable.inputs[i].nbytes and executable.in_specs[i] is not None:
            results[buffer] -= 1
            donated.append(i)
    return tuple(donated)


def _with_frees(
    program: GroupProgram, last: Mapping[int, tuple[Name, ...]], executables: Mapping[str, Executable]
) -> tuple[Instruction, ...]:
    instructions: list[Instruction] = []
    for position, instruction in enumerate(program.instructions):
        instructions.append(instruction)
        dying = last.get(position, ())
        if isinstance(instruction, Run):
            taken = {instruction.inputs[i] for i in executables[instruction.executable].donated}
            dying = tuple(name for name in dying if name not in taken)
        if dying:
            instructions.append(Free(dying))
    return tuple(instructions)
