"""What a plan knows of a step: its layers' work, memory and messages, from one trace."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from mpmd.compiler.graph import TaskGraph
from mpmd.compiler.jaxprs.equations import operands
from mpmd.compiler.jaxprs.flat import FlatEquations, Value
from mpmd.compiler.jaxprs.work import total_operations
from mpmd.ir import TaskType
from mpmd.planner.profile import Layer, Profile, TaskWork
from mpmd.planner.profiling.belongings import nbytes
from mpmd.planner.profiling.divide import Divider
from mpmd.planner.profiling.layered_step import LayeredStep, layered
from mpmd.planner.profiling.traffic import traffic


def profile_of_graph(graph: TaskGraph) -> Profile:
    """What a search knows of a step that is cut into layers: of each stage of the graph."""
    return _Profiler(layered(graph)).profile()


class _Profiler:
    """Sums up the work of a step cut into layers."""

    def __init__(self, step: LayeredStep):
        self._step = step
        self._divider = Divider(step)
        [*rows] = self._divider.classes["data"]
        self._rows = rows[0] if rows else None

    def profile(self) -> Profile:
        """The table."""
        step, loop = self._step, self._step.loop
        rows = next((d.size for d in step.microbatch if step.classes.of(d.value, d.dim) == self._rows), 1)
        shared: dict[tuple[int, ...], int] = collections.Counter()
        for var, layers in step.belongings.weights.items():
            if len(layers) > 1:
                shared[layers] += nbytes(var)
        return Profile(
            layers=tuple(map(self._layer, range(step.num_layers))),
            rows=rows * loop.num_microbatches,
            microbatch_rows=rows,
            num_microbatches=loop.num_microbatches,
            are_stages=True,
            skips=tuple(self._skips()),
            tied=tuple(shared.items()),
            outside=self._outside(),
            batch=sum(map(nbytes, step.belongings.batch)),
            has_backward=any(work.kind != "fwd" for work in step.tasks),
            specs=self._divider.specs(),
        )

    def _layer(self, layer: int) -> Layer:
        step, belong = self._step, self._step.belongings
        return Layer(
            name=f"stage {layer}",
            forward=self._work(TaskType("fwd", layer)),
            backward=self._work(TaskType("bwd", layer)),
            weights=sum(map(nbytes, belong.weights_of(layer))),
            state=sum(nbytes(var) for var, owner in belong.state.items() if owner == layer),
            gradients=sum(nbytes(a.result) for a in step.graph.accumulators if a.work.stage == layer),
            residuals=sum(map(nbytes, step.residuals(layer))),
            entering=sum(nbytes(var) for var, source in step.received(layer) if source == layer - 1),
            divisions=self._divider.of_layer(layer),
        )

    def _skips(self) -> Iterator[tuple[int, int, int]]:
        """From which layer to which values go past others, and their bytes."""
        found: dict[tuple[int, int], int] = collections.Counter()
        for layer in range(self._step.num_layers):
            for var, source in self._step.received(layer):
                if source < layer - 1:
                    found[source, layer] += nbytes(var)
        yield from ((*ends, total) for ends, total in sorted(found.items()))

    def _work(self, work: TaskType) -> TaskWork:
        step = self._step
        members = step.tasks.get(work, ())
        flat = [one.operation for one in members]
        kept = {step.flat.value(var) for var in (*step.reads(work), *step.makes(work))}
        operations = float(sum(one.operation.times * one.work for one in members))
        return TaskWork(operations, *traffic(flat, kept, self._nbytes_of_rows))

    def _nbytes_of_rows(self, value: Value) -> float:
        """The bytes of a value that depends on the rows; of any value, if there are none."""
        depends = self._rows is None or self._rows in self._step.classes.of_value(value)
        return self._step.nbytes(value) if depends else 0.0

    def _outside(self) -> TaskWork:
        """The work outside of the loop, with each value that enters or leaves it once in memory.

        Optimizers are elementwise but for few, so that no product hides what they read and write.
        """
        graph = self._step.graph
        entering = {argument.var for argument in graph.traced.arguments}
        entering |= {accumulator.result for accumulator in graph.accumulators}
        read = {var for eqn in graph.outer for var in operands(eqn)} & entering
        made = {var for eqn in graph.outer for var in eqn.outvars}
        made &= {result.var for result in graph.traced.results}
        operations = sum(one.times * total_operations([one.eqn]) for one in FlatEquations().add(graph.outer))
        moved = float(sum(map(nbytes, read | made)))
        return TaskWork(float(operations), moved, moved)
