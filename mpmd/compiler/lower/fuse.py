"""Makes one list of equations of the tasks of a schedule's cell."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import StageWork
from mpmd.compiler.jaxprs.equations import makers_of, substitute
from mpmd.ir.plan import TaskType
from mpmd.language.callbacks import callback_of


class FusedWork(NamedTuple):
    """Equations of tasks that run as one.

    Attributes:
      callbacks: the equations that are callbacks, each with its work and microbatch.
      names: for microbatches after the first, the variable that stands for each variable of the loop.
    """

    eqns: list[JaxprEqn]
    callbacks: list[tuple[JaxprEqn, TaskType, int]]
    names: dict[int, dict[Var, Var]]


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
    fused = FusedWork([], [], collections.defaultdict(dict))
    defined: set[Var] = set()
    current: dict[Var, Var] = {}  # for states that have been updated
    for stage, microbatch in members:
        names = dict(fused.names[microbatch])
        if microbatch != first:
            of_stage = (*stage.reads, *makers_of(stage.eqns))
            names |= {var: Var(var.aval) for var in of_stage if var in in_loop and var not in names}
        renamed = {**names, **current}  # what a task reads is the state before it
        for eqn in stage.eqns:
            outvars = [names.get(var, var) for var in eqn.outvars]
            if outvars and outvars[0] in defined:
                continue
            defined.update(outvars)
            eqn = substitute(eqn, renamed)
            current.update(
                (states[var], new) for var, new in zip(eqn.outvars, outvars, strict=True) if var in states
            )
            fused.eqns.append(eqn.replace(outvars=outvars) if names else eqn)
            if callback_of(eqn):
                fused.callbacks.append((fused.eqns[-1], stage.work, microbatch))
        fused.names[microbatch] = names
    return fused
