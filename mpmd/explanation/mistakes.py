"""Warnings of steps that compute the right numbers, but probably not as their user intended."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import aval_of, dependents, free_variables, is_among, operands, subjaxprs
from mpmd.compiler.jaxprs.printing import type_text
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.source import nearness_to_user, where
from mpmd.compiler.steps import CutStep, Loop
from mpmd.errors import (
    IdleGroupWarning,
    PerformanceWarning,
    SharedKeyWarning,
    StepWarning,
    UndonatedStateWarning,
    UnreadMicrobatchWarning,
)
from mpmd.explanation.findings import gathering_loops
from mpmd.explanation.uses import groups_text
from mpmd.explanation.work import Jaxprs, loop_work, task_work, uneven_work
from mpmd.ir.plan import OutsideTask, Plan
from mpmd.memory import GroupMemory
from mpmd.memory.sizes import device_bytes
from mpmd.util.tables import first_few, human_bytes
from mpmd.util.warn import warn_user

_SHORT = 0.8
"""The share of a device's memory from which on a step's need counts as short memory."""

_MANY = 1e9
"""The fewest operations of a loop for which their number predicts its time."""

_LARGE = 0.05
"""The share of a device's memory up to which undonated state is too small for a warning."""


def warn_of_mistakes(step: CutStep, plan: Plan, jaxprs: Jaxprs) -> None:
    of_arguments = dependents(itertools.chain(*step.outside), [leaf.var for leaf in step.arguments])
    for loop in step.loops:
        if loop.num_microbatches > 1:
            _warn(UnreadMicrobatchWarning, unread_microbatch(loop, step))
            _warn(SharedKeyWarning, shared_keys(loop, of_arguments))
    _warn(IdleGroupWarning, idle_groups(plan))
    _warn(PerformanceWarning, gathering_loops(plan, jaxprs))
    if sum(loop_work(plan, work := task_work(plan, jaxprs))) >= _MANY:
        _warn(PerformanceWarning, uneven_work(plan, work))


def warn_of_undonated_state(
    plan: Plan,
    fed_back: Collection[tuple[int, int]],
    memory: Sequence[GroupMemory],
    limits: Mapping[int, int],
) -> None:
    """Warns of groups whose memory is short, and that hold state twice because it is not donated.

    Args:
      fed_back: pairs of the position of an argument and of the result that takes its place.
      memory: for each group, the need of each of its devices.
      limits: for each group that has loaded the step, the bytes that each of its devices has.
    """
    for group, limit in limits.items():
        needed = memory[group]
        if needed.peak_bytes <= _SHORT * limit:
            continue
        state = (plan.inputs[argument] for argument, _ in fed_back)
        kept = [leaf for leaf in state if not leaf.donated and group in leaf.mpmd_idxs]
        nbytes = sum(device_bytes(leaf.aval, leaf.spec, plan.submesh(group)) for leaf in kept)
        if nbytes > _LARGE * limit:
            text = (
                f"each device of group {group} needs {human_bytes(needed.peak_bytes)} of its "
                f"{human_bytes(limit)}, and of that {human_bytes(nbytes)} for state that the step returns "
                f"anew and that is not donated, such as {first_few(leaf.path for leaf in kept)}: name its "
                "argument in donate_argnums"
            )
            warn_user(text, UndonatedStateWarning)


def _warn(category: type[StepWarning], texts: Iterable[str]) -> None:
    for text in texts:
        warn_user(text, category)


def unread_microbatch(loop: Loop, step: CutStep) -> Iterator[str]:
    """The warning of a loop that sums, once for each microbatch, one value that depends on its arguments."""
    if any(result.is_carry for result in loop.results):
        return
    of_operations = dependents(loop.eqns, loop.states)
    read = dependents([eqn for eqn in loop.eqns if of_operations.isdisjoint(eqn.outvars)], [loop.index])
    values = [result.value for result in loop.results if result.state is None]
    sums = [value for value in values if isinstance(value, Var)]
    # An operation computes with the index, too, but not with other numbers than integers.
    if any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in read) or not read.isdisjoint(sums):
        return
    outer = [var for var in free_variables(loop.eqns) if var is not loop.index and var not in loop.states]
    computed = dependents(loop.eqns, outer)
    if not computed.isdisjoint(sums):
        yield (
            f"the function of the loop at {loop.where} does not read its microbatch: it computes the same in "
            f"each of the {loop.num_microbatches}. Have it compute with its own argument, and not with the "
            f"batch around it{_read_around(step, set(outer))}"
        )


def _read_around(step: CutStep, outer: set[Var]) -> str:
    """Names the step's arrays with rows that a loop reads and that are no state.

    Args:
      outer: the variables that the loop reads.
    """
    state = {argument for argument, _ in step.fed_back}
    inputs = [(leaf.var, leaf.path) for i, leaf in enumerate(step.arguments) if i not in state]
    inputs += [(var, "a constant array") for var in step.constants]
    eqns = tuple(itertools.chain(*step.outside))
    read = [
        f"{name} ({type_text(aval_of(var))})"
        for var, name in inputs
        if aval_of(var).shape and not outer.isdisjoint(dependents(eqns, [var]))
    ]
    return f": it reads {first_few(read)}" if read else ""


def shared_keys(loop: Loop, of_arguments: set[Var]) -> Iterator[str]:
    """The finding of a loop that draws the same random numbers in every microbatch.

    A key that is a constant of the step draws the same in every step, as for a fixed projection.

    Args:
      of_arguments: the variables outside of loops that depend on the step's arguments.
    """
    varying = dependents(loop.eqns, [loop.index, *loop.states])
    of_step = dependents(loop.eqns, of_arguments)
    lines = dict.fromkeys(where(draw) for eqn in loop.eqns for draw in _draws_alike(eqn, of_step, varying))
    if lines:
        yield (
            f"the loop at {loop.where} draws the same random numbers in all of its {loop.num_microbatches} "
            f"microbatches, at {first_few(lines)}: the key does not depend on the microbatch. Pass a key for "
            f"each, as jax.random.split(key, {loop.num_microbatches}) among the arrays of treduce, or a key "
            "for each row to mpmd.value_and_grad"
        )


def idle_groups(plan: Plan) -> Iterator[str]:
    with_tasks = [
        any(not isinstance(run.task, OutsideTask) for run in program.runs) for program in plan.programs
    ]
    idle = [group for group, has in enumerate(with_tasks) if not has]
    if idle and any(with_tasks):
        have = "has" if len(idle) == 1 else "have"
        busy, num_groups = sum(with_tasks), len(with_tasks)
        yield (
            f"{groups_text(idle)} {have} no work: the step's loops compute on {busy} of {num_groups} groups. "
            f"Have a mesh of {busy} group{'s' * (busy > 1)}, or more stages of work"
        )


def _draws_alike(eqn: JaxprEqn, of_step: set[Var], varying: set[Var]) -> Iterator[JaxprEqn]:
    """Yields the equations in ``eqn``, at any depth, that draw by a key of the step which does not vary."""
    if eqn.primitive.name == "random_bits":
        if varying.isdisjoint(operands(eqn)) and not of_step.isdisjoint(operands(eqn)):
            yield eqn
        return
    for inner in subjaxprs(eqn):
        inner_of_step, inner_varying = (_within(eqn, inner, outer) for outer in (of_step, varying))
        for member in inner.eqns:
            for draw in _draws_alike(member, inner_of_step, inner_varying):
                # A function that JAX has traced before has the lines of its first caller, or none.
                yield draw if nearness_to_user(draw) >= nearness_to_user(eqn) else eqn


def _within(eqn: JaxprEqn, inner: Jaxpr, dependent: set[Var]) -> set[Var]:
    """Returns the variables of a nested jaxpr that depend on the equation's dependent operands."""
    outer = list(eqn.invars)
    if eqn.primitive.name == "cond":
        outer = outer[1:]
    if len(outer) == len(inner.invars):
        pairs = zip(inner.invars, outer, strict=True)
        seeds = {var for var, atom in pairs if is_among(atom, dependent)}
    else:  # such as a while loop, whose functions take some of the operands: whichever are dependent
        seeds = set() if dependent.isdisjoint(operands(eqn)) else set(inner.invars)
    inside = dependents(inner.eqns, seeds)
    if eqn.primitive.name == "scan":
        carry = Scan.of(eqn).carried
        while further := {before for before, after in carry if is_among(after, inside)} - inside:
            inside = dependents(inner.eqns, inside | further)
    return inside
