"""Cuts the loop's body into the work of stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.accumulate import accumulate
from mpmd.assign import Timeline, assign
from mpmd.backward import with_halves
from mpmd.fit import check_fit, checked_tasks
from mpmd.graph import Accumulator, StageWork, TaskGraph, TracedStep, Work
from mpmd.jaxpr import free_variables, operands
from mpmd.marks import LoopBody, take_out_marks
from mpmd.reduce import treduce_p
from mpmd.replicate import Replica, find_replicas
from mpmd.residuals import keep_less


def split(traced: TracedStep) -> TaskGraph:
    """Splits a traced step into work.

    Raises ``CompileError`` when the schedule gives lists of tasks that cannot run or do not fit the loop, and
    when the marks do not make as many stages as it has.
    """
    params = traced.loop.params
    tasks = checked_tasks(params["schedule"], params["length"])
    timeline = Timeline(params["schedule"].num_stages)
    body = take_out_marks(traced)
    replicas = find_replicas(body.eqns, body.index, frozenset(body.carried))
    works = assign(body.eqns, body.earliest, body.written, body.closing, replicas, timeline)
    placed = [(eqn, work) for eqn, work in zip(body.eqns, works, strict=True) if work is not None]
    work_of = {var: work for eqn, work in placed for var in eqn.outvars}
    accumulation = accumulate(traced, body, work_of, timeline)
    members: dict[Work, list[JaxprEqn]] = {}
    for eqn, work in placed:
        if accumulation.split_sums.isdisjoint(eqn.outvars):
            members.setdefault(work, []).append(eqn)
    for work, updates in accumulation.updates.items():
        members.setdefault(work, []).extend(updates)
    own_replicas = _place_replicas(members, body, replicas, timeline)
    in_order = sorted(members, key=timeline.time)
    complete = {work: (*own_replicas.get(work, ()), *members[work]) for work in in_order}
    lean = keep_less(
        complete,
        {accumulator.after for accumulator in accumulation.accumulators},
        {accumulator.before for accumulator in accumulation.accumulators},
        replicas,
    )
    stages = _stage_work(lean.eqns)
    stages = with_halves(stages, tasks, replicas.keys() | lean.recomputed)
    accumulators = tuple(_with_half(accumulator, stages) for accumulator in accumulation.accumulators)
    check_fit(params["schedule"], tasks, stages, accumulators)
    at = next(i for i, eqn in enumerate(traced.jaxpr.eqns) if eqn.primitive is treduce_p)
    before, after = traced.jaxpr.eqns[:at], traced.jaxpr.eqns[at + 1 :]
    return TaskGraph(
        traced,
        (*before, *accumulation.before, *accumulation.after, *after),
        tuple(atom for atom in traced.jaxpr.outvars if isinstance(atom, Var)),
        stages,
        accumulators,
        body.index,
        params["schedule"].num_stages,
        params["length"],
        params["schedule"],
        tasks,
    )


def _stage_work(eqns: Mapping[Work, Sequence[JaxprEqn]]) -> tuple[StageWork, ...]:
    """Notes what work reads and makes."""
    reads = {work: tuple(free_variables(own)) for work, own in eqns.items()}
    read = {var for variables in reads.values() for var in variables}
    return tuple(
        StageWork(work, tuple(own), reads[work], tuple(v for eqn in own for v in eqn.outvars if v in read))
        for work, own in eqns.items()
    )


def _with_half(accumulator: Accumulator, stages: Sequence[StageWork]) -> Accumulator:
    """The accumulator with the half of a backward that updates it."""
    halves = [stage for stage in stages if stage.work.stage == accumulator.work.stage]
    updating = (s.work for s in halves if any(accumulator.after in eqn.outvars for eqn in s.eqns))
    return dataclasses.replace(accumulator, work=next(updating))


def _place_replicas(
    members: Mapping[Work, Sequence[JaxprEqn]],
    body: LoopBody,
    replicas: Mapping[Var, Replica],
    timeline: Timeline,
) -> dict[Work, list[JaxprEqn]]:
    """The replicas that each work computes, in order."""
    wanted: dict[Var, set[Work]] = {}

    def want(work: Work, eqn: JaxprEqn) -> None:
        for var in operands(eqn):
            if var in replicas:
                wanted.setdefault(var, set()).add(work)

    for work, eqns in members.items():
        for eqn in eqns:
            want(work, eqn)
    placed: dict[Work, list[JaxprEqn]] = {}
    for eqn in reversed(body.eqns):
        works = set().union(*(wanted.get(var, ()) for var in eqn.outvars))
        if works and replicas[eqn.outvars[0]].once_per_stage:
            works = _first_of_each_stage(works, timeline)
        for work in works:
            placed.setdefault(work, []).append(eqn)
            want(work, eqn)
    return {work: eqns[::-1] for work, eqns in placed.items()}


def _first_of_each_stage(works: set[Work], timeline: Timeline) -> set[Work]:
    first: dict[int, Work] = {}
    for work in sorted(works, key=timeline.time):
        first.setdefault(work.stage, work)
    return set(first.values())
