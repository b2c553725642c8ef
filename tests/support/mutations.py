"""Breaks plans: each mutation is a plan with one thing changed, and verify has to find it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator

from mpmd.errors import PlanError
from mpmd.ir.plan import Aval, Free, GroupProgram, HostCall, Instruction, Plan, Recv, Run, Send
from mpmd.verify import verify
from tests.support.meaning import meaning

Mutations = Iterator[tuple[str, Plan]]
"""What kind of mutation it is, and its plan."""

OTHER = Aval((3, 5, 7), "float16", 2)
NOBODY = "nobody"


HARMLESS = {
    "swap with the one before",
    "move to the start",
    "move to the end",
    "inputs: one group more",
    "constants: one group more",
}
"""What verify may let pass: another order of instructions that do not depend on one another, and a copy of an
argument or a constant that the caller keeps and nothing reads."""


def assert_found_or_harmless(plan: Plan) -> collections.Counter[bool]:
    """Applies all mutations. Returns how many were found, under ``True``, and how many were let pass.

    A mutation may only pass if the plan then still means the same: run under every order of precedence of its
    groups, it ends, reads no buffer that is gone, runs the same executables on the same operands as often,
    has the same results on the same groups, and nothing is left over.
    """
    orders = list(itertools.permutations(range(len(plan.programs))))
    meanings = [meaning(plan, order) for order in orders]
    assert all(found == meanings[0] for found in meanings)
    found: collections.Counter[bool] = collections.Counter()
    for kind, mutation in mutations(plan):
        try:
            verify(mutation)
        except PlanError:
            found[True] += 1
            continue
        assert kind in HARMLESS, kind
        assert [meaning(mutation, order) for order in orders] == meanings, kind
        found[False] += 1
    return found


def mutations(plan: Plan) -> Mutations:
    """All mutations at all positions.

    Left out are those that make another plan as good as this one, computing something else: a run that reads
    another value of the same shape and dtype, or uses another executable of the same signature. That the
    plan is that of the step is for the tests that compare it with what JAX computes.
    """
    for group, program in enumerate(plan.programs):
        for at, instruction in enumerate(program.instructions):
            for kind, changed in _of_order(plan, group, at):
                yield kind, changed
            for kind, other in _of_instruction(plan, group, instruction):
                kind = f"{type(instruction).__name__}: {kind}"
                yield kind, _spliced(plan, group, at, at + 1, (other,))
    yield from _of_executables(plan)
    yield from _of_leaves(plan)
    yield from _of_programs(plan)


def _spliced(plan: Plan, group: int, start: int, stop: int, new: tuple[Instruction, ...]) -> Plan:
    program = plan.programs[group]
    instructions = (*program.instructions[:start], *new, *program.instructions[stop:])
    programs = list(plan.programs)
    programs[group] = dataclasses.replace(program, instructions=instructions)
    return dataclasses.replace(plan, programs=tuple(programs))


def _of_order(plan: Plan, group: int, at: int) -> Mutations:
    instructions = plan.programs[group].instructions
    this = instructions[at]
    dropped = _spliced(plan, group, at, at + 1, ())
    yield "drop", dropped
    yield "repeat", _spliced(plan, group, at, at, (this,))
    yield "repeat at the end", _spliced(plan, group, len(instructions), len(instructions), (this,))
    if at:
        yield "swap with the one before", _spliced(plan, group, at - 1, at + 1, (this, instructions[at - 1]))
        yield "move to the start", _spliced(dropped, group, 0, 0, (this,))
    if at < len(instructions) - 1:
        yield "move to the end", _spliced(dropped, group, len(instructions), len(instructions), (this,))
    for other in range(len(plan.programs)):
        if other != group:
            yield "move to another group", _spliced(dropped, other, at, at, (this,))


def _of_instruction(plan: Plan, group: int, this: Instruction) -> Iterator[tuple[str, Instruction]]:
    match this:
        case Run():
            yield from _of_run(plan, this)
        case Send() | Recv():
            end = "dst" if isinstance(this, Send) else "src"
            for other in range(-1, len(plan.programs) + 1):
                if other != getattr(this, end):
                    yield "another group", dataclasses.replace(this, **{end: other})
            for tag in (this.tag - 1, this.tag + 1):
                yield "another tag", dataclasses.replace(this, tag=tag)
            yield from _of_names(plan, this, "values")
        case HostCall() | Free():
            yield from _of_names(plan, this, "values")


def _of_run(plan: Plan, run: Run) -> Iterator[tuple[str, Instruction]]:
    this = plan.executable(run.executable)
    yield "an executable that does not exist", dataclasses.replace(run, executable=NOBODY)
    for other in plan.executables:
        if (other.inputs, other.outputs) != (this.inputs, this.outputs):
            yield "another executable", dataclasses.replace(run, executable=other.name)
    for field, avals in (("inputs", this.inputs), ("outputs", this.outputs)):
        names = getattr(run, field)
        for i, j in itertools.combinations(range(len(names)), 2):
            if avals[i] != avals[j]:
                swapped = list(names)
                swapped[i], swapped[j] = names[j], names[i]
                yield f"swap {field}", dataclasses.replace(run, **{field: tuple(swapped)})
        yield from _of_names(plan, run, field)


def _of_names(plan: Plan, this: Instruction, field: str) -> Iterator[tuple[str, Instruction]]:
    """Drops, repeats and changes each of the names in a field of an instruction."""
    names = getattr(this, field)
    avals = plan.avals()
    for i, name in enumerate(names):
        changes = {
            "drop a name": (),
            "repeat a name": (name, name),
            "a name that does not exist": (NOBODY,),
        }
        other = next((other for other in avals if avals[other] != avals[name]), None)
        if other is not None:
            changes["the name of another value"] = (other,)
        for kind, new in changes.items():
            changed = (*names[:i], *new, *names[i + 1 :])
            yield f"{kind} in {field}", dataclasses.replace(this, **{field: changed})
    if not isinstance(this, Run):
        kept = next((leaf.name for leaf in plan.inputs if leaf.name and not leaf.donated), None)
        for extra in (kept, *{leaf.name for leaf in plan.outputs}):
            if extra is not None and extra not in names:
                yield f"one more name in {field}", dataclasses.replace(this, **{field: (*names, extra)})


def _of_executables(plan: Plan) -> Mutations:
    for at, this in enumerate(plan.executables):
        inputs = range(len(this.inputs))
        changes = [("rename an executable", {"name": NOBODY})]
        for i in inputs:
            donated = set(this.donated) ^ {i}
            kind = "donate" if i in donated else "do not donate"
            changes.append((f"{kind} an input", {"donated": tuple(sorted(donated))}))
        changes.append(("donate no input", {"donated": (*this.donated, len(this.inputs))}))
        for field in ("inputs", "outputs"):
            avals = getattr(this, field)
            for i in range(len(avals)):
                changes.append((f"other {field}", {field: (*avals[:i], OTHER, *avals[i + 1 :])}))
                changes.append((f"fewer {field}", {field: (*avals[:i], *avals[i + 1 :])}))
        for kind, change in changes:
            yield kind, _with_part(plan, "executables", at, **change)
        yield "drop an executable", _without_part(plan, "executables", at)
        yield "repeat an executable", dataclasses.replace(plan, executables=(*plan.executables, this))


def _of_leaves(plan: Plan) -> Mutations:
    everyone = range(len(plan.programs))
    for field in ("inputs", "constants", "outputs"):
        for at, leaf in enumerate(getattr(plan, field)):
            changes = [("another aval", {"aval": OTHER}), ("another name", {"name": NOBODY})]
            changes += [
                ("one group less", {"mpmd_idxs": tuple(i for i in leaf.mpmd_idxs if i != group)})
                for group in leaf.mpmd_idxs
            ]
            changes += [
                ("one group more", {"mpmd_idxs": (*leaf.mpmd_idxs, group)})
                for group in (-1, *everyone, len(everyone))
                if group not in leaf.mpmd_idxs
            ]
            if field == "inputs":
                changes.append(("donate or do not", {"donated": not leaf.donated}))
            for kind, change in changes:
                yield f"{field}: {kind}", _with_part(plan, field, at, **change)
            yield f"{field}: drop", _without_part(plan, field, at)


def _of_programs(plan: Plan) -> Mutations:
    for i, j in itertools.combinations(range(len(plan.programs)), 2):
        programs = list(plan.programs)
        programs[i], programs[j] = programs[j], programs[i]
        yield "swap programs", dataclasses.replace(plan, programs=tuple(programs))
        renumbered = [GroupProgram(k, program.instructions) for k, program in enumerate(programs)]
        yield "swap the instructions of groups", dataclasses.replace(plan, programs=tuple(renumbered))
    for i, program in enumerate(plan.programs):
        yield "drop a program", _without_part(plan, "programs", i)
        empty = dataclasses.replace(program, instructions=())
        yield (
            "empty a program",
            dataclasses.replace(plan, programs=(*plan.programs[:i], empty, *plan.programs[i + 1 :])),
        )


def _with_part(plan: Plan, field: str, at: int, **changes) -> Plan:
    parts = list(getattr(plan, field))
    parts[at] = dataclasses.replace(parts[at], **changes)
    return dataclasses.replace(plan, **{field: tuple(parts)})


def _without_part(plan: Plan, field: str, at: int) -> Plan:
    parts = getattr(plan, field)
    return dataclasses.replace(plan, **{field: (*parts[:at], *parts[at + 1 :])})
