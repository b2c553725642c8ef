"""Breaks plans: each mutation is a plan with one thing changed, and verify has to find it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from mpmd.errors import PlanError
from mpmd.ir.plan import (
    Aval,
    ConstantLeaf,
    Executable,
    Free,
    GroupProgram,
    HostCall,
    InputLeaf,
    Instruction,
    OutputLeaf,
    Plan,
    Recv,
    Run,
    Send,
)
from mpmd.verify import verify
from tests.verify.meaning import meaning

Changes = Iterator[tuple[str, Any]]
"""Changed copies of a part of a plan, each with the kind of the mutation."""

CHANGED = {
    Plan: ("programs", "executables", "inputs", "constants", "outputs"),
    GroupProgram: ("instructions",),
    Run: ("executable", "inputs", "outputs"),
    Send: ("values", "dst", "tag"),
    Recv: ("values", "src", "tag"),
    HostCall: ("values",),
    Free: ("values",),
    Executable: ("name", "inputs", "outputs", "donated"),
    InputLeaf: ("name", "aval", "mpmd_idxs", "donated"),
    ConstantLeaf: ("name", "aval", "mpmd_idxs"),
    OutputLeaf: ("name", "aval", "mpmd_idxs"),
}
"""The fields that mutations change; about other fields, verify proves nothing."""

HARMLESS = {
    "instructions: swap with the one before",
    "instructions: move to the start",
    "instructions: move to the end",
    "InputLeaf.mpmd_idxs: one more",
    "ConstantLeaf.mpmd_idxs: one more",
}
"""What verify may let pass: another order of instructions that do not depend on one another, and a copy of an
argument or a constant that the caller keeps and nothing reads."""

OTHER = Aval((3, 5, 7), "float16", 2)
NOBODY = "nobody"


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
    for kind, mutation in itertools.chain(_of_record(plan, plan), _of_order(plan)):
        try:
            verify(mutation)
        except PlanError:
            found[True] += 1
            continue
        assert kind in HARMLESS, kind
        assert [meaning(mutation, order) for order in orders] == meanings, kind
        found[False] += 1
    return found


def _of_record(plan: Plan, record: Any) -> Changes:
    """Changes each field of one part of a plan, such as a run or an executable.

    Left out are changes that make another plan as good as this one, computing something else: a run that
    reads another value of the same shape and dtype, or uses another executable of the same signature. That
    the plan is that of the step is for the tests that compare it with what JAX computes.
    """
    for field in CHANGED[type(record)]:
        value = getattr(record, field)
        changes = list(_of_value(plan, value))
        for extra in _extras(plan, record, field):
            if extra not in value:
                changes.append(("one more", (*value, extra)))
        for kind, changed in changes:
            inner = kind if "." in kind else f"{type(record).__name__}.{field}: {kind}"
            yield inner, dataclasses.replace(record, **{field: changed})


def _extras(plan: Plan, record: Any, field: str) -> Iterable[Any]:
    """Elements to add to a field that is a set."""
    if field == "mpmd_idxs":
        return range(-1, len(plan.programs) + 1)
    if field == "donated" and isinstance(record, Executable):
        return range(len(record.inputs) + 1)
    if field == "values":
        kept = (leaf.name for leaf in plan.inputs if leaf.name and not leaf.donated)
        return {leaf.name for leaf in plan.outputs} | set(itertools.islice(kept, 1))
    return ()


def _of_value(plan: Plan, value: Any) -> Changes:
    match value:
        case None:
            return
        case bool():
            yield "the opposite", not value
        case int():
            yield "one lower", value - 1
            yield "one higher", value + 1
        case str():
            yield "a name that does not exist", NOBODY
            if other := _of_another_type(plan, value):
                yield "the name of another", other
        case Aval():
            yield "another aval", OTHER
        case tuple():
            yield from _of_tuple(plan, value)
        case _:
            yield from _of_record(plan, value)


def _of_tuple(plan: Plan, parts: tuple) -> Changes:
    for i, part in enumerate(parts):
        yield "drop", (*parts[:i], *parts[i + 1 :])
        if isinstance(part, int):
            continue
        if isinstance(part, str | Aval | Executable | Instruction):
            yield "repeat", (*parts[:i], part, *parts[i:])
        for kind, changed in _of_value(plan, part):
            yield kind, (*parts[:i], changed, *parts[i + 1 :])


def _of_another_type(plan: Plan, name: str) -> str | None:
    """A value of another shape or dtype, or an executable of another signature."""
    avals = plan.avals()
    types: dict[str, Any] = (
        avals if name in avals else {e.name: (e.inputs, e.outputs) for e in plan.executables}
    )
    return next((other for other in types if types[other] != types[name]), None)


def _of_order(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Moves programs, instructions, and operands and results of other shapes or dtypes."""
    avals = plan.avals()
    for i, j in itertools.combinations(range(len(plan.programs)), 2):
        yield "programs: swap", dataclasses.replace(plan, programs=_exchanged(plan.programs, i, j))
    for group, program in enumerate(plan.programs):
        instructions = program.instructions
        for at, this in enumerate(instructions):
            before, behind = instructions[:at], instructions[at + 1 :]
            orders = {
                "repeat at the end": (*instructions, this),
                "move to the start": (this, *before, *behind),
                "move to the end": (*before, *behind, this),
            }
            if at:
                orders["swap with the one before"] = (*before[:-1], this, before[-1], *behind)
            if isinstance(this, Run):
                for field in ("inputs", "outputs"):
                    names = getattr(this, field)
                    for i, j in itertools.combinations(range(len(names)), 2):
                        if avals[names[i]] != avals[names[j]]:
                            changed = dataclasses.replace(this, **{field: _exchanged(names, i, j)})
                            yield f"Run.{field}: swap", _with(plan, group, (*before, changed, *behind))
            for kind, changed in orders.items():
                if changed != instructions:
                    yield f"instructions: {kind}", _with(plan, group, changed)
            for other, receiver in enumerate(plan.programs):
                if other != group:
                    received = (*receiver.instructions[:at], this, *receiver.instructions[at:])
                    moved = _with(_with(plan, group, (*before, *behind)), other, received)
                    yield "instructions: move to another group", moved


def _exchanged(parts: tuple, i: int, j: int) -> tuple:
    exchanged = list(parts)
    exchanged[i], exchanged[j] = parts[j], parts[i]
    return tuple(exchanged)


def _with(plan: Plan, group: int, instructions: tuple[Instruction, ...]) -> Plan:
    programs = list(plan.programs)
    programs[group] = dataclasses.replace(programs[group], instructions=instructions)
    return dataclasses.replace(plan, programs=tuple(programs))
