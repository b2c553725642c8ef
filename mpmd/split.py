"""Cuts the loop's body into the work of stages, and its results into accumulators that stages keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.interpreters import partial_eval

from mpmd.annotate import Boundary, mark_p
from mpmd.assign import Timeline, assign
from mpmd.errors import CompileError
from mpmd.graph import Accumulator, StageWork, TaskGraph, TracedStep, Work
from mpmd.jaxpr import (
    NAMELESS,
    Atom,
    aval_of,
    free_variables,
    lookup,
    make_jaxpr,
    operands,
    substitute,
    traced_eqns,
    where,
)
from mpmd.reduce import as_scan, treduce_p
from mpmd.replicate import find_replicas

_SUMS = ("add_any", "add")


def split(traced: TracedStep) -> TaskGraph:
    """Splits a traced step into work.

    Raises ``CompileError`` when the marks do not make as many stages as the schedule has.
    """
    return _Split(traced).run()


@dataclasses.dataclass(frozen=True)
class _Body:
    """The loop's body over outer variables, with marks taken out.

    ``earliest`` has for each equation the time of the first work that it can belong to, as far as marks say;
    ``closing`` the operands of the mark that each work ends with.
    """

    eqns: list[JaxprEqn]
    earliest: list[int | None]
    outputs: list[Atom]
    index: Var
    carried: list[Var]
    closing: dict[Work, list[Var]]


class _Split:
    def __init__(self, traced: TracedStep):
        self._traced = traced
        self._params = traced.loop.params
        self._num_stages: int = self._params["schedule"].num_stages
        self._timeline = Timeline(self._num_stages)
        self._loop_position = next(i for i, eqn in enumerate(traced.jaxpr.eqns) if eqn.primitive is treduce_p)
        self._accumulators: list[Accumulator] = []
        self._updates: dict[Work, list[JaxprEqn]] = {}
        self._sums_after: list[JaxprEqn] = []
        self._unstaged: list[int] = []  # positions of results that no stage's value goes into

    def run(self) -> TaskGraph:
        body = self._body()
        self._body_eqns = body.eqns
        self._maker = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        self._replicas = find_replicas(body.eqns, body.index, frozenset(body.carried))
        works = assign(body.eqns, body.earliest, body.closing, self._replicas, self._num_stages)
        self._work_of = {
            var: work
            for eqn, work in zip(body.eqns, works, strict=True)
            if work is not None
            for var in eqn.outvars
        }
        self._accumulate(body)
        members: dict[Work, list[JaxprEqn]] = {}
        for eqn, work in zip(body.eqns, works, strict=True):
            if work is not None and not self._is_split_sum(eqn):
                members.setdefault(work, []).append(eqn)
        stages = self._stage_work(members)
        traced = self._traced
        outputs = tuple(atom for atom in traced.jaxpr.outvars if isinstance(atom, Var))
        before = traced.jaxpr.eqns[: self._loop_position]
        after = traced.jaxpr.eqns[self._loop_position + 1 :]
        unstaged = self._unstaged_results(body)
        outer = (*before, *self._initial_eqns, *unstaged, *self._sums_after, *after)
        return TaskGraph(
            traced,
            outer,
            outputs,
            stages,
            tuple(self._accumulators),
            body.index,
            self._num_stages,
            self._params["length"],
            self._params["schedule"],
        )

    def _body(self) -> _Body:
        body: Jaxpr = self._params["body"]
        stage_of = self._stages_ended([eqn for eqn in body.eqns if eqn.primitive is mark_p])
        replacement: dict[Var, Atom] = dict(zip(body.constvars, self._traced.loop.invars, strict=False))
        index, *carried = body.invars
        result = _Body([], [], [], index, carried, {})
        behind: dict[Var, int] = {}  # for what a mark returns, the time of the work after it
        for eqn in body.eqns:
            earliest = max((behind[var] for var in operands(eqn) if var in behind), default=None)
            eqn = substitute(eqn, replacement)
            if eqn.primitive is not mark_p:
                result.eqns.append(eqn)
                result.earliest.append(earliest)
                continue
            replacement.update(zip(eqn.outvars, eqn.invars, strict=True))
            stage, forward = stage_of[eqn.outvars[0]], eqn.params["forward"]
            if stage < self._num_stages - 1:  # the mark after the last stage, if any, ends nothing
                here, there = stage, stage + 1
                closed = Work("fwd", here) if forward else Work("bwd", there)
                opened = Work("fwd", there) if forward else Work("bwd", here)
                result.closing.setdefault(closed, []).extend(operands(eqn))
                behind.update(dict.fromkeys(eqn.outvars, self._timeline.time(opened)))
        result.outputs.extend(lookup(atom, replacement) for atom in body.outvars)
        return result

    def _stages_ended(self, marks: Sequence[JaxprEqn]) -> dict[Var, int]:
        """The stage that each mark ends, by the mark's first result."""
        ends = [m for m in marks if m.params["forward"] and not m.params["linear"]]
        if len(ends) not in (self._num_stages - 1, self._num_stages):
            raise CompileError(self._wrong_number_of_marks(ends))
        boundaries = dict.fromkeys(mark.params["boundary"] for mark in marks)
        return {
            mark.outvars[0]: stage
            for boundary in boundaries
            for mark, stage in _numbered(marks, ends, boundary)
        }

    def _wrong_number_of_marks(self, ends: Sequence[JaxprEqn]) -> str:
        schedule, wanted = self._params["schedule"], self._num_stages
        places = "".join(f"\n  stage {i} ends at {where(mark)}" for i, mark in enumerate(ends))
        return (
            f"the function that treduce applies has {len(ends)} calls of mark_stage_end, which end "
            f"{len(ends)} stages, but the schedule {schedule} has {wanted} stages: it needs {wanted - 1} "
            f"marks, or {wanted} with one after the last stage.{places}"
        )

    # Accumulators.

    def _accumulate(self, body: _Body) -> None:
        """Turns every result that a stage's value goes into into accumulators."""
        states = self._traced.loop.invars[len(self._params["body"].constvars) :]
        self._initial_eqns: list[JaxprEqn] = []
        self._split_sums: set[Var] = set()
        uses = _count_uses(body)
        carried = iter(body.carried)
        for position, (value, is_sum, initial, result) in enumerate(
            zip(body.outputs, self._params["summed"], states, self._traced.loop.outvars, strict=True)
        ):
            before = None if is_sum else next(carried)
            if self._work(value) is None:
                self._unstaged.append(position)
            elif is_sum:
                self._sum(value, initial, result, uses)
            else:
                assert before is not None and isinstance(value, Var)
                self._carry(value, before, initial, result)

    def _work(self, atom: Atom) -> Work | None:
        return self._work_of.get(atom) if isinstance(atom, Var) else None

    def _carry(self, value: Var, before: Var, initial: Atom, result: Var) -> None:
        # A copy, because other work or another result may read the same value under its own name.
        eqns, (after,) = traced_eqns(lambda x: [jnp.copy(x)], [value])
        self._update(self._work_of[value], eqns)
        start = self._initial(jnp.copy, initial)
        self._accumulators.append(Accumulator(self._work_of[value], before, after, start, result))

    def _sum(self, value: Atom, initial: Atom, result: Var, uses: Mapping[Var, int]) -> None:
        """One accumulator for each stage that contributes; added up after the loop, by ascending stage."""
        terms = self._terms(value, uses)
        latest = max((w for t in terms if (w := self._work(t))), key=self._timeline.time)
        by_stage: dict[int, list[Atom]] = {}
        for term in terms:
            by_stage.setdefault((self._work(term) or latest).stage, []).append(term)
        if len(by_stage) == 1:
            by_stage = {latest.stage: [value]}
        else:
            self._split_sums |= self._inner_sums(value, uses)
        parts: list[Var] = []
        for _, contributions in sorted(by_stage.items()):
            works = [self._work(term) or latest for term in contributions]
            parts.append(Var(result.aval) if len(by_stage) > 1 else result)
            start = self._initial(jnp.copy if len(parts) == 1 else jnp.zeros_like, initial)
            self._add_accumulator(max(works, key=self._timeline.time), contributions, start, parts[-1])
        if len(parts) > 1:
            eqns, (total,) = traced_eqns(_sum_in_order, parts)
            assert eqns[-1].outvars == [total]
            self._sums_after += [*eqns[:-1], eqns[-1].replace(outvars=[result])]

    def _add_accumulator(self, work: Work, terms: Sequence[Atom], initial: Var, result: Var) -> None:
        before = Var(result.aval)

        def update(state, *values):
            return [lax.add(state, _sum_in_order(*values)[0])]

        eqns, (after,) = traced_eqns(update, [before, *terms])
        self._update(work, eqns)
        self._accumulators.append(Accumulator(work, before, after, initial, result))

    def _update(self, work: Work, eqns: list[JaxprEqn]) -> None:
        self._updates.setdefault(work, []).extend(eqns)

    def _initial(self, fun, state: Atom) -> Var:
        """A value of its own for an accumulator to start from: it will be updated in place."""
        eqns, (start,) = traced_eqns(lambda x: [jnp.copy(fun(x))], [state])
        self._initial_eqns += eqns
        return start

    def _terms(self, value: Atom, uses: Mapping[Var, int]) -> list[Atom]:
        """The summands of ``value``, as far as it is a sum that nothing else reads."""
        eqn = self._sum_eqn(value, uses)
        return [value] if eqn is None else [t for atom in eqn.invars for t in self._terms(atom, uses)]

    def _inner_sums(self, value: Atom, uses: Mapping[Var, int]) -> set[Var]:
        eqn = self._sum_eqn(value, uses)
        if eqn is None:
            return set()
        return {eqn.outvars[0]}.union(*(self._inner_sums(atom, uses) for atom in eqn.invars))

    def _sum_eqn(self, value: Atom, uses: Mapping[Var, int]) -> JaxprEqn | None:
        eqn = self._maker.get(value) if isinstance(value, Var) and uses[value] == 1 else None
        if eqn is None or eqn.primitive.name not in _SUMS or self._work(value) is None:
            return None
        same = all(aval_of(atom).shape == aval_of(value).shape for atom in eqn.invars)
        return eqn if same else None

    def _is_split_sum(self, eqn: JaxprEqn) -> bool:
        return any(var in self._split_sums for var in eqn.outvars)

    def _unstaged_results(self, body: _Body) -> list[JaxprEqn]:
        """Results that no stage's value goes into come from an ordinary scan outside the pipeline."""
        if not self._unstaged:
            return []
        summed = tuple(self._params["summed"][i] for i in self._unstaged)
        states = self._traced.loop.invars[len(self._params["body"].constvars) :]
        carried = dict(zip(self._carried_positions(), body.carried, strict=True))
        inputs = [body.index, *(carried[i] for i in self._unstaged if i in carried)]
        outer = [var for var in free_variables(body.eqns) if var not in (body.index, *body.carried)]
        outputs = [body.outputs[i] for i in self._unstaged]
        outer += [v for v in outputs if isinstance(v, Var) and v not in self._maker and v not in outer]
        whole = make_jaxpr([*outer, *inputs], body.eqns, outputs)
        wanted = [False] * len(outer) + [True] * len(inputs)
        needed, used = partial_eval.dce_jaxpr(whole, [True] * len(outputs), wanted)
        outer = [var for var, is_used in zip(outer, used, strict=False) if is_used]
        needed = needed.replace(
            constvars=needed.invars[: len(outer)], invars=needed.invars[len(outer) :], debug_info=NAMELESS
        )
        scan = partial(as_scan, body=needed, summed=summed, length=self._params["length"])
        eqns, results = traced_eqns(scan, [*outer, *(states[i] for i in self._unstaged)])
        bound = {var: self._traced.loop.outvars[i] for var, i in zip(results, self._unstaged, strict=True)}
        return [eqn.replace(outvars=[bound.get(var, var) for var in eqn.outvars]) for eqn in eqns]

    def _carried_positions(self) -> list[int]:
        return [i for i, is_sum in enumerate(self._params["summed"]) if not is_sum]

    # Work.

    def _stage_work(self, members: Mapping[Work, list[JaxprEqn]]) -> tuple[StageWork, ...]:
        works = sorted({*members, *self._updates}, key=self._timeline.time)
        eqns = {work: [*members.get(work, ()), *self._updates.get(work, ())] for work in works}
        provided = self._place_replicas(eqns)
        order = {var: i for i, eqn in enumerate(self._body_eqns) for var in eqn.outvars}
        defined_by: dict[Work, set[Var]] = {}
        for work in works:
            replicas = sorted(provided.get(work, ()), key=lambda eqn: order[eqn.outvars[0]])
            eqns[work] = [*replicas, *eqns[work]]
            defined_by[work] = {var for eqn in eqns[work] for var in eqn.outvars}
        reads = {work: tuple(free_variables(eqns[work])) for work in works}
        read_elsewhere = {var for work in works for var in reads[work]}
        return tuple(
            StageWork(
                work,
                tuple(eqns[work]),
                reads[work],
                tuple(v for eqn in eqns[work] for v in eqn.outvars if v in read_elsewhere),
            )
            for work in works
        )

    def _place_replicas(self, eqns: Mapping[Work, list[JaxprEqn]]) -> dict[Work, list[JaxprEqn]]:
        """The replicas that each work computes for its equations."""
        wanted: dict[Var, set[Work]] = {}

        def want(work: Work, eqn: JaxprEqn) -> None:
            for var in operands(eqn):
                if var in self._replicas:
                    wanted.setdefault(var, set()).add(work)

        for work, members in eqns.items():
            for eqn in members:
                want(work, eqn)
        placed: dict[Work, list[JaxprEqn]] = {}
        for eqn in reversed(self._body_eqns):
            works = set().union(*(wanted.get(var, ()) for var in eqn.outvars))
            if works and self._replicas[eqn.outvars[0]].once_per_stage:
                works = _first_of_each_stage(works, self._timeline)
            for work in works:
                placed.setdefault(work, []).append(eqn)
                want(work, eqn)
        return placed


def _first_of_each_stage(works: set[Work], timeline: Timeline) -> set[Work]:
    first: dict[int, Work] = {}
    for work in sorted(works, key=timeline.time):
        first.setdefault(work.stage, work)
    return set(first.values())


def _numbered(
    marks: Sequence[JaxprEqn], ends: Sequence[JaxprEqn], boundary: Boundary
) -> list[tuple[JaxprEqn, int]]:
    """The marks of one boundary, each with the stage that ends there.

    A function under ``jit`` that is called for several stages brings the same boundary several times;
    differentiation goes through those calls in reverse.
    """
    stages = [stage for stage, mark in enumerate(ends) if mark.params["boundary"] is boundary]
    numbered: list[tuple[JaxprEqn, int]] = []
    for forward in (True, False):
        same = [m for m in marks if m.params["boundary"] is boundary and m.params["forward"] == forward]
        order = stages if forward else stages[::-1]
        if forward:
            same_ends = [mark for mark in same if not mark.params["linear"]]
            numbered += zip(same_ends, order, strict=True)
            same = [mark for mark in same if mark.params["linear"]]
        numbered += [(mark, order[i % len(order)]) for i, mark in enumerate(same)]
    return numbered


def _count_uses(body: _Body) -> dict[Var, int]:
    uses: dict[Var, int] = {}
    atoms = [atom for eqn in body.eqns for atom in eqn.invars] + body.outputs
    for atom in atoms:
        if isinstance(atom, Var):
            uses[atom] = uses.get(atom, 0) + 1
    return uses


def _sum_in_order(*values):
    total = values[0]
    for value in values[1:]:
        total = lax.add(total, value)
    return [total]
