"""Makes one list of equations of the tasks of a schedule's cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import StageWork
from mpmd.compiler.jaxprs.equations import Atom, free_variables
from mpmd.ir.plan import TaskType
from mpmd.language.callbacks import callback_of


@dataclasses.dataclass(frozen=True)
class FusedWork:
    """Equations of tasks that run as one.

    Attributes:
      callbacks: those among the equations that are callbacks, each with its work and microbatch.
      reads: the variables that the equations read and do not define.
      origin: for each of ``reads`` the variable of the loop that it stands for, and the microbatch.
      variables: the same the other way round, for all variables of the loop.
    """

    eqns: tuple[JaxprEqn, ...]
    callbacks: tuple[tuple[JaxprEqn, TaskType, int], ...]
    reads: tuple[Var, ...]
    origin: dict[Var, tuple[Var, int]]
    variables: dict[tuple[Var, int], Var]


def fuse(members: Sequence[tuple[StageWork, int]], in_loop: Set[Var], states: Mapping[Var, Var]) -> FusedWork:
    """Concatenates the equations of tasks, each a work with its microbatch.

    An equation that several tasks of one microbatch have, because it is duplicated, is kept once. Tasks of
    different microbatches get different variables. When several tasks update a state, each reads the state
    that the task before it wrote.

    Args:
      in_loop: the variables that are another value in every microbatch.
      states: for each updated state of an accumulator, the variable of the state before.
    """
    first = members[0][1]
    variables: dict[tuple[Var, int], Var] = {}
    defined: set[Var] = set()
    eqns: list[JaxprEqn] = []
    callbacks: list[tuple[JaxprEqn, TaskType, int]] = []
    current: dict[Var, Var] = {}  # for states that have been updated

    def variable(var: Var, microbatch: int) -> Var:
        if var not in in_loop:
            return var
        fresh = var if microbatch == first else Var(var.aval)
        return variables.setdefault((var, microbatch), fresh)

    def renamed(atom: Atom, microbatch: int) -> Atom:
        if not isinstance(atom, Var):
            return atom
        return current.get(atom) or variable(atom, microbatch)

    for stage, microbatch in members:
        updated: dict[Var, Var] = {}
        for eqn in stage.eqns:
            outvars = [variable(var, microbatch) for var in eqn.outvars]
            if outvars and outvars[0] in defined:
                continue
            defined.update(outvars)
            invars = [renamed(atom, microbatch) for atom in eqn.invars]
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
            if callback_of(eqn):
                callbacks.append((eqns[-1], stage.work, microbatch))
            for var, fresh in zip(eqn.outvars, outvars, strict=True):
                if var in states:
                    updated[states[var]] = fresh
        current |= updated  # what a task reads is the state before it
    stands_for = {var: key for key, var in variables.items()}
    reads = tuple(free_variables(eqns))
    origin = {var: stands_for.get(var, (var, first)) for var in reads}
    return FusedWork(tuple(eqns), tuple(callbacks), reads, origin, variables)
