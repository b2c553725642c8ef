"""What a plan knows of a step: its layers' work, memory and messages, from one trace."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jax.extend.core import Var

from mpmd.compiler.graph import TaskGraph, Work
from mpmd.compiler.jaxprs.equations import operands, subjaxprs
from mpmd.compiler.jaxprs.flat import FlatEquations, Operation, Value
from mpmd.explanation.work import operations
from mpmd.planner.profile import Layer, Profile, TaskWork
from mpmd.planner.profiling.belongings import belongings, nbytes
from mpmd.planner.profiling.classes import classed
from mpmd.planner.profiling.microbatch import microbatch_dims
from mpmd.planner.profiling.tracing import traced_layers
from mpmd.planner.profiling.traffic import traffic


def profile_of(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Profile:
    """What a search knows of ``step(*args, **kwargs)``.

    Args:
      step: a train step with a loop over microbatches; static arguments are bound.
      args, kwargs: pytrees of arrays or ``ShapeDtypeStruct``s.

    Raises: ``CompileError`` as ``mpmd.jit``; ``ValueError`` for a step without a loop.
    """
    return _Profiler(traced_layers(step, args, kwargs)).profile()


class _Profiler:
    """Sums up the work of a graph whose stages are layers."""

    def __init__(self, graph: TaskGraph):
        self._graph = graph
        self._tasks = {member.work: member for member in graph.stage_work}
        self._belongings = belongings(graph)
        self._made_by = {var: member.work for member in graph.stage_work for var in member.makes}
        self._flat = FlatEquations()
        flat = {work: self._flat.add(member.eqns) for work, member in self._tasks.items()}
        self._classes, self._operations = classed(self._flat, flat)
        taken = microbatch_dims(
            self._flat, (one for members in flat.values() for one in members), self._belongings.sliced
        )
        self._rows = next((dim for dim in taken), None)

    def profile(self) -> Profile:
        """The table."""
        loop, belong = self._graph.traced.loop, self._belongings
        assert loop is not None, "the step has been traced with its loop"
        rows = self._rows.size if self._rows else 1
        shared: dict[tuple[int, ...], int] = collections.Counter()
        for var, layers in belong.weights.items():
            if len(layers) > 1:
                shared[layers] += nbytes(var)
        return Profile(
            layers=tuple(map(self._layer, range(loop.schedule.num_stages))),
            rows=rows * loop.num_microbatches,
            microbatch_rows=rows,
            num_microbatches=loop.num_microbatches,
            are_stages=True,
            skips=tuple(self._skips()),
            tied=tuple(shared.items()),
            outside=self._outside(),
            batch=sum(map(nbytes, belong.batch)),
            has_backward=any(work.kind != "fwd" for work in self._tasks),
            specs={},
        )

    def _layer(self, layer: int) -> Layer:
        return Layer(
            name=f"stage {layer}",
            forward=self._work(Work("fwd", layer)),
            backward=self._work(Work("bwd", layer)),
            weights=sum(map(nbytes, self._belongings.weights_of(layer))),
            state=sum(nbytes(var) for var, owner in self._belongings.state.items() if owner == layer),
            gradients=sum(nbytes(a.result) for a in self._graph.accumulators if a.work.stage == layer),
            residuals=sum(map(nbytes, self._residuals(layer))),
            entering=sum(nbytes(var) for var, source in self._received(layer) if source == layer - 1),
            divisions={},
        )

    def _reads(self, work: Work) -> tuple[Var, ...]:
        return self._tasks[work].reads if work in self._tasks else ()

    def _residuals(self, layer: int) -> Iterator[Var]:
        """What forwards make for the layer's backward."""
        for var in self._reads(Work("bwd", layer)):
            maker = self._made_by.get(var)
            if maker is not None and maker.kind == "fwd":
                yield var

    def _received(self, layer: int) -> Iterator[tuple[Var, int]]:
        """What the layer's forward gets from other layers, with these."""
        for var in self._reads(Work("fwd", layer)):
            maker = self._made_by.get(var)
            if maker is not None and maker.stage != layer:
                yield var, maker.stage

    def _skips(self) -> Iterator[tuple[int, int, int]]:
        """From which layer to which values go past others, and their bytes."""
        found: dict[tuple[int, int], int] = collections.Counter()
        for work in self._tasks:
            if work.kind == "fwd":
                for var, source in self._received(work.stage):
                    if source < work.stage - 1:
                        found[source, work.stage] += nbytes(var)
        yield from ((*ends, total) for ends, total in sorted(found.items()))

    def _work(self, work: Work) -> TaskWork:
        if work not in self._tasks:
            return TaskWork(0.0, 0.0)
        member = self._tasks[work]
        flat = [one.operation for one in self._operations[work]]
        kept = {self._flat.value(var) for var in (*member.reads, *member.makes)}
        return TaskWork(
            operations=float(sum(one.times * _operations_of(one) for one in flat)),
            nbytes=traffic(flat, kept, self._nbytes_of_rows),
        )

    def _nbytes_of_rows(self, value: Value) -> float:
        """The bytes of a value that depends on the rows."""
        if self._rows is not None:
            rows = self._classes.of(self._rows.value, self._rows.dim)
            if rows not in self._classes.of_value(value):
                return 0.0
        aval = self._flat.avals[value]
        return aval.size * aval.dtype.itemsize

    def _outside(self) -> TaskWork:
        """The work outside of the loop, with each value that enters or leaves it once in memory."""
        traced, outer = self._graph.traced, self._graph.outer
        entering = {argument.var for argument in traced.arguments}
        entering |= {accumulator.result for accumulator in self._graph.accumulators}
        read = {var for eqn in outer for var in operands(eqn)} & entering
        made = {var for eqn in outer for var in eqn.outvars} & {result.var for result in traced.results}
        flat = FlatEquations().add(outer)
        return TaskWork(
            operations=float(sum(one.times * _operations_of(one) for one in flat)),
            nbytes=float(sum(map(nbytes, read | made))),
        )


def _operations_of(operation: Operation) -> int:
    """The operations of one iteration; of what is opaque to a plan, those inside."""
    inner = subjaxprs(operation.eqn)
    if not inner:
        return operations(operation.eqn)
    return max(_total(FlatEquations().add(jaxpr.eqns)) for jaxpr in inner)


def _total(members: Iterable[Operation]) -> int:
    return sum(member.times * _operations_of(member) for member in members)
