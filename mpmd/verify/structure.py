"""Checks that the parts of a plan fit together: leaves, executables, and the names in instructions."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from mpmd.ir.plan import ConstantLeaf, Executable, InputLeaf, OutputLeaf, Plan, Recv, Run, Send
from mpmd.ir.specs import indivisible


def check_structure(plan: Plan) -> Iterator[str]:
    yield from _check_leaves(plan)
    for executable in plan.executables:
        yield from _check_executable(executable)
    names = collections.Counter(executable.name for executable in plan.executables)
    yield from (f"{count} executables are called {name}" for name, count in names.items() if count > 1)
    yield from _check_references(plan)
    yield from _check_submeshes(plan)


def check_avals(plan: Plan) -> Iterator[str]:
    avals = plan.avals()
    for program in plan.programs:
        for run in program.runs:
            for name, aval in zip(run.outputs, plan.executable(run.executable).outputs, strict=True):
                if avals[name] != aval:
                    where = f"group {program.mpmd_idx}, {run.task}"
                    yield f"{where}: makes {name} as {aval}, which elsewhere is {avals[name]}"
    for leaf in plan.outputs:
        if (known := avals.get(leaf.name, leaf.aval)) != leaf.aval:
            yield f"the result {leaf.path} is to be {leaf.aval}, but {leaf.name} is {known}"


def describe(plan: Plan, mpmd_idx: int, position: int) -> str:
    instruction = str(plan.programs[mpmd_idx].instructions[position])[:80]
    return f"group {mpmd_idx}, instruction {position} ({instruction})"


def _check_leaves(plan: Plan) -> Iterator[str]:
    residents: tuple[InputLeaf | ConstantLeaf, ...] = (*plan.inputs, *plan.constants)
    leaves: tuple[InputLeaf | ConstantLeaf | OutputLeaf, ...] = (*residents, *plan.outputs)
    for leaf in leaves:
        if not set(leaf.mpmd_idxs) <= set(range(len(plan.programs))):
            yield f"{leaf.name} is on groups {leaf.mpmd_idxs}, of which not all exist"
    names = collections.Counter(leaf.name for leaf in residents if leaf.name)
    yield from (
        f"{count} inputs or constants are called {name}" for name, count in names.items() if count > 1
    )
    yield from (f"no group has the result {leaf.path}" for leaf in plan.outputs if not leaf.mpmd_idxs)


def _check_executable(executable: Executable) -> Iterator[str]:
    name, inputs, donated = executable.name, executable.inputs, executable.donated
    if (len(executable.in_specs), len(executable.out_specs)) != (len(inputs), len(executable.outputs)):
        yield f"{name} does not have a spec for each of its inputs and outputs"
    if len(set(donated)) < len(donated) or not set(donated) <= set(range(len(inputs))):
        yield f"{name} donates {donated} of {len(inputs)} inputs"
        return
    spare = collections.Counter(executable.outputs)
    spare.subtract(inputs[i] for i in donated)
    for aval in (aval for aval, count in spare.items() if count < 0):
        yield f"{name} donates more inputs of {aval} than it has outputs to take them over"


def _check_references(plan: Plan) -> Iterator[str]:
    groups = range(len(plan.programs))
    executables = {executable.name: executable for executable in plan.executables}
    for mpmd_idx, program in enumerate(plan.programs):
        if program.mpmd_idx != mpmd_idx:
            yield f"the program at {mpmd_idx} is that of group {program.mpmd_idx}"
        for position, instruction in enumerate(program.instructions):
            if isinstance(instruction, Run):
                fault = _check_run(instruction, executables.get(instruction.executable))
            elif isinstance(instruction, (Send, Recv)):
                peer = instruction.dst if isinstance(instruction, Send) else instruction.src
                fault = "" if peer in groups and peer != mpmd_idx else "has no other group at its other end"
            else:
                continue
            if fault:
                yield f"{describe(plan, mpmd_idx, position)} {fault}"


def _check_submeshes(plan: Plan) -> Iterator[str]:
    if plan.submeshes and len(plan.submeshes) != len(plan.programs):
        yield f"there are {len(plan.submeshes)} submeshes for {len(plan.programs)} groups"
        return
    executables = {executable.name: executable for executable in plan.executables}
    first: dict[str, int] = {}
    for here, program in enumerate(plan.programs):
        for name in {run.executable for run in program.runs} & executables.keys():
            other = first.setdefault(name, here)
            if plan.submesh(other) != plan.submesh(here):
                yield f"{name} is for groups {other} and {here}, whose submeshes are not equal"
            elif other == here:
                yield from _check_specs(plan, executables[name], here)


def _check_specs(plan: Plan, executable: Executable, mpmd_idx: int) -> Iterator[str]:
    avals = (*executable.inputs, *executable.outputs)
    for aval, spec in zip(avals, (*executable.in_specs, *executable.out_specs), strict=False):
        for dimension, parts in indivisible(spec or (), aval.shape, plan.submesh(mpmd_idx)):
            yield (
                f"{executable.name} on group {mpmd_idx} takes or makes {aval} sharded {spec}, "
                f"but dimension {dimension} does not divide by {parts}"
            )


def _check_run(run: Run, executable: Executable | None) -> str:
    if executable is None:
        return f"runs {run.executable}, which does not exist"
    if (len(run.inputs), len(run.outputs)) != (len(executable.inputs), len(executable.outputs)):
        return f"does not have the numbers of inputs and outputs of {run.executable}"
    return ""
