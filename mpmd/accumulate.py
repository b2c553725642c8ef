"""Turns the loop's results into accumulators that stages keep."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.interpreters import partial_eval

from mpmd.assign import Timeline
from mpmd.graph import Accumulator, TracedStep, Work
from mpmd.jaxpr import (
    NAMELESS,
    Atom,
    aval_of,
    free_variables,
    make_jaxpr,
    traced_eqns,
)
from mpmd.marks import LoopBody
from mpmd.reduce import as_scan

_SUMS = ("add_any", "add")


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """What becomes of the loop's results.

    Attributes:
      updates: the equations that work has in addition, to update its accumulators.
      before: the equations that make the accumulators' initial values.
      after: the equations that make the loop's results of the accumulators, and of nothing at all those that
        no stage contributes to.
      split_sums: variables of the body whose summands are accumulated apart, so that nothing reads them.
    """

    accumulators: list[Accumulator] = dataclasses.field(default_factory=list)
    updates: dict[Work, list[JaxprEqn]] = dataclasses.field(default_factory=dict)
    before: list[JaxprEqn] = dataclasses.field(default_factory=list)
    after: list[JaxprEqn] = dataclasses.field(default_factory=list)
    split_sums: set[Var] = dataclasses.field(default_factory=set)


def accumulate(
    traced: TracedStep, body: LoopBody, work_of: Mapping[Var, Work], timeline: Timeline
) -> Accumulation:
    """Decides which work accumulates which result.

    A sum is updated where its summand is made. When several stages make summands, as they do for the gradient
    of a weight that they share, each has an accumulator; these are added after the loop by ascending stage.
    Any other operation is applied where the whole value of the microbatch is made. A result that no stage's
    value goes into comes from an ordinary scan outside of the pipeline.

    Args:
      work_of: the work of the body's variables, other than replicas.
    """
    result = Accumulation()
    loop, summed = traced.loop, traced.loop.params["summed"]
    initial = loop.invars[len(loop.params["body"].constvars) :]
    before = iter(body.carried)
    states = [None if is_sum else next(before) for is_sum in summed]
    builder = _Builder(result, body, work_of, timeline)
    unstaged = []
    for position, value in enumerate(body.outputs):
        state = states[position]
        if builder.work(value) is None:
            unstaged.append(position)
        elif state is None:
            builder.add_sum(value, initial[position], loop.outvars[position])
        else:
            ordered = loop.params["ordered"][position]
            builder.add_other(value, state, initial[position], loop.outvars[position], ordered)
    for position in unstaged:  # one each, as each has a place of its own
        result.after.extend(_scan_outside(traced, body, states, position))
    return result


class _Builder:
    def __init__(self, result: Accumulation, body: LoopBody, work_of: Mapping[Var, Work], timeline: Timeline):
        self._result = result
        self._work_of = work_of
        self._timeline = timeline
        self._maker = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        read = (atom for eqn in body.eqns for atom in eqn.invars)
        self._uses = collections.Counter(a for a in (*read, *body.outputs) if isinstance(a, Var))

    def work(self, atom: Atom) -> Work | None:
        return self._work_of.get(atom) if isinstance(atom, Var) else None

    def add_other(self, value: Atom, before: Var, initial: Atom, result: Var, ordered: bool) -> None:
        work = self.work(value)
        assert work is not None, "no stage makes the value"
        # A copy, because other work or another result may read the same value under its own name.
        eqns, (after,) = traced_eqns(lambda x: [jnp.copy(x)], [value])
        self._result.updates.setdefault(work, []).extend(eqns)
        start = self._initial(jnp.copy, initial)
        self._result.accumulators.append(Accumulator(work, before, after, start, result, ordered))

    def add_sum(self, value: Atom, initial: Atom, result: Var) -> None:
        summands, inner_sums = self._summands(value)
        latest = max((w for s in summands if (w := self.work(s))), key=self._timeline.time)
        by_stage: dict[int, list[Atom]] = {}
        for summand in summands:
            by_stage.setdefault((self.work(summand) or latest).stage, []).append(summand)
        if len(by_stage) == 1:
            self._add_part(latest, [value], self._initial(jnp.copy, initial), result)
            return
        self._result.split_sums.update(inner_sums)
        parts: list[Var] = []
        for _, mine in sorted(by_stage.items()):
            start = self._initial(jnp.zeros_like if parts else jnp.copy, initial)
            work = max((self.work(summand) or latest for summand in mine), key=self._timeline.time)
            parts.append(Var(result.aval))
            self._add_part(work, mine, start, parts[-1])
        eqns, _ = traced_eqns(lambda *values: [_sum_in_order(values, aval_of(result).dtype)], parts)
        self._result.after.extend([*eqns[:-1], eqns[-1].replace(outvars=[result])])

    def _add_part(self, work: Work, summands: Sequence[Atom], initial: Var, result: Var) -> None:
        before = Var(result.aval)
        eqns, (after,) = traced_eqns(
            lambda state, *values: [lax.add(state, _sum_in_order(values, state.dtype))], [before, *summands]
        )
        self._result.updates.setdefault(work, []).extend(eqns)
        self._result.accumulators.append(Accumulator(work, before, after, initial, result, False))

    def _initial(self, fun: Callable, state: Atom) -> Var:
        """A value of its own for an accumulator to start from, because it will be updated in place."""
        eqns, (start,) = traced_eqns(lambda x: [jnp.copy(fun(x))], [state])
        self._result.before.extend(eqns)
        return start

    def _summands(self, value: Atom) -> tuple[list[Atom], list[Var]]:
        """The summands of ``value``, as far as it is a sum that nothing else reads, and the sums between.

        A sum of halves that is then widened, as for weights that the loss casts, is a sum of widened halves.
        """
        summands: list[Atom] = []
        inner: list[Var] = []
        stack = [value]
        while stack:
            atom = stack.pop()
            eqn = self._sum_eqn(atom)
            if eqn is None:
                summands.append(atom)
            else:
                inner.extend(eqn.outvars)
                stack.extend(reversed(eqn.invars))
        return summands, inner

    def _sum_eqn(self, value: Atom) -> JaxprEqn | None:
        eqn = self._maker.get(value) if isinstance(value, Var) and self._uses[value] == 1 else None
        if eqn is None or self.work(value) is None or not (eqn.primitive.name in _SUMS or _widens(eqn)):
            return None
        same = all(aval_of(atom).shape == aval_of(value).shape for atom in eqn.invars)
        return eqn if same else None


def _widens(eqn: JaxprEqn) -> bool:
    """Whether the equation converts floats to floats of more bits."""
    if eqn.primitive.name != "convert_element_type":
        return False
    narrow, wide = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
    floats = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return bool(floats and narrow.itemsize < wide.itemsize)


def _sum_in_order(values, dtype):
    total, *others = (lax.convert_element_type(value, dtype) for value in values)
    for value in others:
        total = lax.add(total, value)
    return total


def _scan_outside(
    traced: TracedStep, body: LoopBody, states: Sequence[Var | None], position: int
) -> list[JaxprEqn]:
    """The equations of the result at ``position``, which no stage has a part in."""
    params = traced.loop.params
    initial = traced.loop.invars[len(params["body"].constvars) + position]
    state = states[position]
    inputs = [body.index] if state is None else [body.index, state]
    inside = {body.index, *body.carried, *(var for eqn in body.eqns for var in eqn.outvars)}
    outputs = [body.outputs[position]]
    read = [*free_variables(body.eqns), *(atom for atom in outputs if isinstance(atom, Var))]
    outer = [var for var in dict.fromkeys(read) if var not in inside]
    whole = make_jaxpr([*outer, *inputs], body.eqns, outputs)
    instantiate = [False] * len(outer) + [True] * len(inputs)
    needed, used = partial_eval.dce_jaxpr(whole, [True], instantiate)
    outer = [var for var, is_used in zip(outer, used, strict=False) if is_used]
    needed = needed.replace(
        constvars=needed.invars[: len(outer)], invars=needed.invars[len(outer) :], debug_info=NAMELESS
    )
    scan = partial(as_scan, body=needed, summed=(state is None,), length=params["length"])
    eqns, (result,) = traced_eqns(scan, [*outer, initial])
    bound = {result: traced.loop.outvars[position]}
    return [eqn.replace(outvars=[bound.get(var, var) for var in eqn.outvars]) for eqn in eqns]
