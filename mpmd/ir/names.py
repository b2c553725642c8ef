"""The names of values and executables in a plan.

The grammar, with the rules of ``tasks.py``::

    name             ::= path                                         an argument: args[0]['w']
                       | "constant_" position                         a constant of the step
                       | "index_" microbatch                          the index of a microbatch
                       | single "." position                          an output of a task: fwd_2__1.0
                       | type ".state" number "@" microbatch          an accumulator after a microbatch
                       | outside "." group "." position               made outside of loops: after_0.2.1
                       | single "." "operand" position                for the driver: fwd_2__1.operand0
                       | outside "." group "." "operand" position     for the driver: after_0.2.operand0
    executable-name  ::= base ["'" number] ["@" number]               fwd_1, fwd_1'2, fwd_1@1
    base             ::= type ("+" type)* | outside "." group         fwd_3+bwd_3, after_0.1
    type             ::= kind "_" stage                               fwd_2

The compiler makes the names; no code parses them.
"""

from __future__ import annotations

from mpmd.ir.plan import Name, OutsideTask, TaskType


def constant_name(position: int) -> Name:
    return f"constant_{position}"


def index_name(microbatch: int) -> Name:
    return INDEX_PATTERN % microbatch


INDEX_PATTERN = "index_%d"


def operand(position: int) -> str:
    """The place of an operand of a callback, where an output of a task has its position: ``operand0``."""
    return f"operand{position}"


def output_pattern(work: TaskType, position: int | str) -> str:
    """The name of an output of a task, with ``%d`` for the microbatch: ``fwd_2__%d.0``."""
    return f"{work}__%d.{position}"


def state_pattern(work: TaskType, accumulator: int) -> str:
    return f"{work}.state{accumulator}@%d"


def outside_name(task: OutsideTask, mpmd_idx: int, position: int | str) -> Name:
    return f"{task}.{mpmd_idx}.{position}"


def variant_name(name: str, number: int) -> str:
    """The name of one of several executables for the same tasks: ``fwd_1'2`` is the second for ``fwd_1``.

    Number 1 has the name itself.
    """
    return name if number == 1 else f"{name}'{number}"


def resharded_name(name: str, number: int) -> str:
    """The name of an executable for inputs of other shardings: ``fwd_1@1``. Number 0 has the name itself."""
    return name if number == 0 else f"{name}@{number}"
