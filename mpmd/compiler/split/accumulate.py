"""Turns the loop's results into accumulators that stages keep."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import Accumulator
from mpmd.compiler.jaxprs.control_flow import live_eqns
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    entry_of,
    free_variables,
    make_jaxpr,
    makers_of,
    operands,
    variables,
)
from mpmd.compiler.jaxprs.traced import copy_of, traced_eqns
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.compiler.split.remove_marks import LoopBody
from mpmd.compiler.steps import Loop, LoopResult
from mpmd.ir.plan import TaskType
from mpmd.language.reduce import as_scan

_SUMS = ("add_any", "add")


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """The results of a loop as accumulators.

    Attributes:
      eqns: the equations of each work, including the updates of its accumulators.
      before: the equations before the loop, which compute the accumulators' initial values.
      after: the equations after the loop, which compute its results from the accumulators, and the scans that
        compute the results to which no stage contributes.
    """

    accumulators: tuple[Accumulator, ...]
    eqns: Mapping[TaskType, tuple[JaxprEqn, ...]]
    before: tuple[JaxprEqn, ...]
    after: tuple[JaxprEqn, ...]

    @property
    def states(self) -> Set[Var]:
        return {accumulator.state for accumulator in self.accumulators}

    @property
    def updated(self) -> Set[Var]:
        return {accumulator.updated for accumulator in self.accumulators}


def accumulate(
    loop: Loop, body: LoopBody, assigned: Mapping[JaxprEqn, TaskType], order: MicrobatchOrder
) -> Accumulation:
    """Decides which work accumulates which result.

    A sum is updated where its summand is computed. When several stages compute summands, as for the gradient
    of a weight that they share, each stage has an accumulator, and the accumulators are added after the loop
    in ascending order of stages. A stage has one accumulator for all slices of a microbatch. Any other
    operation is applied where the value of the microbatch is computed. A result that depends on no stage's
    value comes from an ordinary scan outside of the pipeline. A carried value is updated where its next value
    is computed, or, if no work computes that, where the carried value is read first.
    """
    builder = _Builder(body, assigned, order)
    unstaged = []
    for result in body.results:
        if not result.is_carry and builder.work(result.value) is None:
            unstaged.append(result)
        elif result.state is None:
            builder.add_sum(result)
        else:
            builder.add_update(result, result.state)
    for result in unstaged:  # one scan for each, because each is placed by itself
        builder.after += _scan_outside(loop, body, result)
    return builder.accumulation(assigned)


@dataclasses.dataclass(frozen=True)
class _AccumulatorPart:
    state: Var
    initial: Var
    result: Var


class _Builder:
    def __init__(self, body: LoopBody, assigned: Mapping[JaxprEqn, TaskType], order: MicrobatchOrder):
        self.after: list[JaxprEqn] = []
        self._accumulators: list[Accumulator] = []
        self._updates: dict[TaskType, list[JaxprEqn]] = collections.defaultdict(list)
        self._before: list[JaxprEqn] = []
        # Sums whose summands are accumulated apart, so that nothing reads them.
        self._split_sums: set[Var] = set()
        self._order = order
        self._work_of = {var: work for eqn, work in assigned.items() for var in eqn.outvars}
        self._readers: dict[Var, set[TaskType]] = collections.defaultdict(set)
        for eqn, work in assigned.items():
            for var in operands(eqn):
                self._readers[var].add(work)
        self._maker = makers_of(body.eqns)
        read = (atom for eqn in body.eqns for atom in eqn.invars)
        values = (result.value for result in body.results)
        self._uses = collections.Counter(variables((*read, *values)))

    def accumulation(self, assigned: Mapping[JaxprEqn, TaskType]) -> Accumulation:
        eqns: dict[TaskType, list[JaxprEqn]] = {}
        for eqn, work in assigned.items():
            if self._split_sums.isdisjoint(eqn.outvars):
                eqns.setdefault(work, []).append(eqn)
        for work, updates in self._updates.items():
            eqns.setdefault(work, []).extend(updates)
        return Accumulation(
            accumulators=tuple(self._accumulators),
            eqns={work: tuple(eqns_of_work) for work, eqns_of_work in eqns.items()},
            before=tuple(self._before),
            after=tuple(self.after),
        )

    def work(self, atom: Atom) -> TaskType | None:
        return entry_of(atom, self._work_of)

    def add_update(self, result: LoopResult, state: Var) -> None:
        # A copy, because other work or another result may read the same value under its own name.
        update = copy_of(result.value)
        new = Accumulator(
            work=self.work(result.value) or self._reader(state, result.value),
            state=state,
            updated=update.outvars[0],
            initial=self._start(result.initial),
            result=result.result,
            ordered=result.ordered,
            is_carry=result.is_carry,
        )
        self._updates[new.work].append(update)
        self._accumulators.append(new)

    def _reader(self, state: Var, value: Atom) -> TaskType:
        """Returns the first task that reads the state or, without a reader, the updated value."""
        known = [self._readers.get(var) for var in variables((state, value))]
        positions = [self._order.position(work) for work in next(filter(None, known), ())]
        return self._order.work(self._order.earliest(positions) if positions else 0)

    def add_sum(self, whole: LoopResult) -> None:
        value, initial, result = whole.value, whole.initial, whole.result
        summands, inner_sums = self._summands(value)
        latest = self._latest(w for s in summands if (w := self.work(s)))
        by_stage: dict[int, list[Atom]] = {}
        for summand in summands:
            by_stage.setdefault((self.work(summand) or latest).stage, []).append(summand)
        if len(by_stage) == 1:
            # A sum with what depends on a weight alone may be on the weight's stage, behind its summands.
            part = _AccumulatorPart(Var(result.aval), self._start(initial), result)
            self._add_part(self.work(value) or latest, [value], part)
            return
        self._split_sums.update(inner_sums)
        parts: dict[TaskType, _AccumulatorPart] = {}
        for _, of_stage in sorted(by_stage.items()):
            work = self._latest(self.work(summand) or latest for summand in of_stage)
            # A stage's forwards, and its backwards, on all slices add to the same state.
            on_all_slices = TaskType(work.kind, self._order.numbers.stage_of(work.stage))
            if on_all_slices not in parts:
                start = self._start(initial, are_zeros=bool(parts))
                parts[on_all_slices] = _AccumulatorPart(Var(result.aval), start, Var(result.aval))
            self._add_part(work, of_stage, parts[on_all_slices])
        self._add_up([part.result for part in parts.values()], result)

    def _add_up(self, parts: Sequence[Var], result: Var) -> None:
        if len(parts) == 1:
            self._accumulators = [
                dataclasses.replace(a, result=result) if a.result is parts[0] else a
                for a in self._accumulators
            ]
            return
        eqns, _ = traced_eqns(lambda *values: [_sum_in_order(values, aval_of(result).dtype)], parts)
        self.after.extend([*eqns[:-1], eqns[-1].replace(outvars=[result])])

    def _latest(self, works: Iterable[TaskType]) -> TaskType:
        return self._order.work(self._order.latest(map(self._order.position, works)))

    def _add_part(self, work: TaskType, summands: Sequence[Atom], part: _AccumulatorPart) -> None:
        eqns, (updated,) = traced_eqns(_added, [part.state, *summands])
        self._updates[work].extend(eqns)
        self._accumulators.append(
            Accumulator(work, part.state, updated, part.initial, part.result, ordered=False)
        )

    def _start(self, state: Atom, are_zeros: bool = False) -> Var:
        """The variable from which an accumulator starts: a copy, since it is updated in place, or zeros."""
        eqns = traced_eqns(_copied_zeros, [state])[0] if are_zeros else [copy_of(state)]
        self._before.extend(eqns)
        return eqns[-1].outvars[0]

    def _summands(self, value: Atom) -> tuple[list[Atom], list[Var]]:
        """Returns the summands of ``value``, and the intermediate sums between them and ``value``.

        A value that is no sum is its own only summand. A sum of half-precision values that is then widened,
        as for weights that the loss casts, counts as a sum of widened values.
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
        by_stages = any(self.work(atom) for atom in eqn.invars)
        return eqn if same and by_stages else None


@jax.jit
def _copied_zeros(state):
    return [jnp.copy(jnp.zeros_like(state))]


def _widens(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    narrow, wide = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
    floats = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return bool(floats and narrow.itemsize < wide.itemsize)


@jax.jit
def _added(state, *values):
    return [lax.add(state, _sum_in_order(values, state.dtype))]


def _sum_in_order(values, dtype):
    total, *others = (lax.convert_element_type(value, dtype) for value in values)
    for value in others:
        total = lax.add(total, value)
    return total


def _scan_outside(loop: Loop, body: LoopBody, result: LoopResult) -> list[JaxprEqn]:
    eqns = live_eqns(body.eqns, [result.value])
    inputs = [loop.index] if result.state is None else [loop.index, result.state]
    inside = {loop.index, *loop.states, *makers_of(eqns)}
    read = dict.fromkeys([*free_variables(eqns), *variables([result.value])])
    outer = [var for var in read if var not in inside]
    needed = make_jaxpr([*outer, *inputs], eqns, [result.value])
    scan = partial(as_scan, body=needed, summed=(result.state is None,), length=loop.num_microbatches)
    new_eqns, (final,) = traced_eqns(scan, [*outer, result.initial])
    if not any(final in eqn.outvars for eqn in new_eqns):  # the state never changes, and JAX leaves it out
        new_eqns.append(copy_of(final))
        (final,) = new_eqns[-1].outvars
    return [
        eqn.replace(outvars=[result.result if var is final else var for var in eqn.outvars])
        for eqn in new_eqns
    ]
