"""Resolves the specs that a plan leaves open, by asking the compiler of a group's submesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mpmd.ir import Executable, GroupProgram, Instruction, Name, Plan, Recv, Run, Spec
from mpmd.names import resharded_name
from mpmd.program import Function, Program
from mpmd.specs import fitting

OutputSpecs = Callable[[int, Executable, Function], tuple[Spec, ...]]
"""``(mpmd_idx, executable, function)`` to the output specs that the group's compiler chooses."""


def resolve_specs(program: Program, output_specs: OutputSpecs) -> Program:
    """Returns the program with every spec of its plan known.

    Values are followed from producer to reader, across groups: a reader takes a value in the sharding that
    its producer gives it, so an executable that reads differently sharded values becomes several. A group on
    whose submesh that sharding does not fit takes the value replicated. A plan without open specs, such as
    that of one-device groups, is returned unchanged, and nothing is compiled.
    """
    plan = program.plan
    if all(None not in (*e.in_specs, *e.out_specs) for e in plan.executables):
        return program
    specs = _specs_at_start(plan)
    resolved: dict[tuple[str, tuple[Spec, ...]], Executable] = {}
    functions: dict[str, Function] = {}
    instructions = [list(group.instructions) for group in plan.programs]

    def with_specs(run: Run, mpmd_idx: int) -> Run:
        executable = plan.executable(run.executable)
        in_specs = tuple(
            specs[mpmd_idx, name] if spec is None else spec
            for name, spec in zip(run.inputs, executable.in_specs, strict=True)
        )
        key = (run.executable, in_specs)
        if key not in resolved:
            variants = sum(name == run.executable for name, _ in resolved)
            name = resharded_name(run.executable, variants)
            executable = dataclasses.replace(executable, in_specs=in_specs)
            if None in executable.out_specs:
                chosen = output_specs(mpmd_idx, executable, program.functions[run.executable])
                executable = dataclasses.replace(executable, out_specs=chosen)
            resolved[key] = dataclasses.replace(executable, name=name)
            functions[name] = program.functions[run.executable]
        variant = resolved[key]
        for name, spec in zip(run.outputs, variant.out_specs, strict=True):
            assert spec is not None, f"{variant.name}: {name} has no spec"
            specs[mpmd_idx, name] = spec
        return dataclasses.replace(run, executable=variant.name)

    _walk(plan, instructions, specs, with_specs)
    resolved_plan = dataclasses.replace(
        plan,
        programs=tuple(GroupProgram(i, tuple(mine)) for i, mine in enumerate(instructions)),
        executables=tuple(resolved.values()),
        outputs=tuple(
            dataclasses.replace(leaf, spec=specs[leaf.mpmd_idxs[0], leaf.name]) for leaf in plan.outputs
        ),
    )
    return dataclasses.replace(program, plan=resolved_plan, functions=functions)


def _specs_at_start(plan: Plan) -> dict[tuple[int, Name], Spec]:
    """For each group and value that it holds before the step, the value's spec there."""
    inputs = ((leaf.mpmd_idxs, leaf.name, leaf.spec) for leaf in plan.inputs if leaf.name)
    constants = ((leaf.mpmd_idxs, leaf.name, ()) for leaf in plan.constants)
    return {(mpmd_idx, name): spec for groups, name, spec in (*inputs, *constants) for mpmd_idx in groups}


def _walk(
    plan: Plan,
    programs: list[list[Instruction]],
    specs: dict[tuple[int, Name], Spec],
    with_specs: Callable[[Run, int], Run],
) -> None:
    """Rewrites every ``Run`` in place, each after the runs that make its inputs."""
    avals = plan.avals()
    positions = [0] * len(programs)
    while any(position < len(program) for position, program in zip(positions, programs, strict=True)):
        before = list(positions)
        for mpmd_idx, program in enumerate(programs):
            while positions[mpmd_idx] < len(program):
                match program[positions[mpmd_idx]]:
                    case Run() as run:
                        program[positions[mpmd_idx]] = with_specs(run, mpmd_idx)
                    case Recv(values, src):
                        if not all((src, name) in specs for name in values):
                            break  # a value is still to be made by the other group
                        for name in values:
                            sizes = plan.submesh(mpmd_idx)
                            specs[mpmd_idx, name] = fitting(specs[src, name], avals[name].shape, sizes)
                positions[mpmd_idx] += 1
        assert positions != before, "the programs wait for one another: verify should have refused them"
