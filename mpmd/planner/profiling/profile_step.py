"""Profiles of a step's loops: the work, memory and messages of their layers, from one trace."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence

from jax.extend.core import Var

from mpmd.compiler.jaxprs.flat import Value
from mpmd.ir.plan import TaskType
from mpmd.language.remat import Remat
from mpmd.planner.layer_profile import Layer, LayerProfile, Recomputation, TaskWork
from mpmd.planner.profiling.classes import ClassedOperation
from mpmd.planner.profiling.divide import Divider
from mpmd.planner.profiling.layer_names import layer_names
from mpmd.planner.profiling.layered_step import LayeredLoop, LayeredStep
from mpmd.planner.profiling.outside import work_outside
from mpmd.planner.profiling.ownership import nbytes
from mpmd.planner.profiling.plain_attention import on_scores
from mpmd.planner.profiling.recompute import POLICIES, recomputed
from mpmd.planner.profiling.task_work import task_work


def loop_profiles(step: LayeredStep) -> tuple[LayerProfile, ...]:
    return tuple(map(_Profiler(step).profile, range(len(step.loops))))


class _Profiler:
    def __init__(self, step: LayeredStep):
        self._step = step
        self._divider = Divider(step)
        self._rows = self._divider.classes["data"]
        self._outside = work_outside(step)
        self._names = layer_names(step)
        self._specs = self._divider.specs()

    def profile(self, number: int) -> LayerProfile:
        step, loop = self._step, self._step.loops[number]
        divided = (d.size for d in loop.divisible if step.classes.of(d.value, d.dim) in self._rows)
        rows = loop.rows if loop.is_open else next(divided, 1)
        return LayerProfile(
            layers=tuple(self._layer(layer, loop) for layer in loop.layers),
            rows=rows * loop.num_microbatches,
            microbatch_rows=rows,
            num_microbatches=None if loop.is_open else loop.num_microbatches,
            are_stages=True,
            skips=tuple(self._skips(loop)),
            tied=tuple(self._tied(loop).items()),
            outside=self._outside[number],
            batch=sum(map(nbytes, step.ownership.batch)),
            has_backward=any(
                task_type.kind != "fwd" for task_type in step.tasks if task_type.stage in loop.layers
            ),
            specs=self._specs,
            decision_index=loop.decision_index if step.graph.step.loops else None,
            between=self._divider.between,
            attention=self._attention(loop),
        )

    def _tied(self, loop: LayeredLoop) -> Mapping[tuple[int, ...], int]:
        shared: dict[tuple[int, ...], int] = collections.Counter()
        for var, layers in self._step.ownership.weights.items():
            readers = tuple(layer - loop.layers.start for layer in layers if layer in loop.layers)
            if len(readers) > 1:
                shared[readers] += nbytes(var)
        return shared

    def _nbytes_of_other_loops(self, loop: LayeredLoop) -> int:
        ownership = self._step.ownership
        weights = (var for var, layers in ownership.weights.items() if not {*layers} & {*loop.layers})
        state = (var for var, layer in ownership.state.items() if layer not in loop.layers)
        return sum(map(nbytes, weights)) + sum(map(nbytes, state))

    def _layer(self, layer: int, loop: LayeredLoop) -> Layer:
        step, ownership = self._step, self._step.ownership
        divisions, reduced = self._divider.of_layer(layer), self._divider.reduced(layer)
        state = sum(nbytes(var) for var, owner in ownership.state.items() if owner == layer)
        return Layer(
            name=self._names[layer],
            forward=self._work(TaskType("fwd", layer)),
            backward=self._work(TaskType("bwd", layer)),
            weights=sum(map(nbytes, ownership.weights_of(layer))),
            state=state + self._nbytes_of_other_loops(loop) // len(loop.layers),
            gradients=sum(nbytes(a.result) for a in step.graph.accumulators if a.work.stage == layer),
            residuals=sum(map(nbytes, step.residuals(layer))),
            entering=sum(nbytes(var) for var, source in step.received(layer) if source == layer - 1),
            divisions=divisions,
            sequence_parallel=self._divider.sequence_parallel(layer, divisions.get("model")),
            gathered=sum(self._gathered(var, layer) for var in ownership.weights_of(layer)),
            recomputations={policy: self._recomputation(layer, policy, reduced) for policy in POLICIES},
        )

    def _recomputation(self, layer: int, policy: Remat, reduced: Sequence[float]) -> Recomputation:
        """``reduced`` has the bytes that each operation of the layer's forward all-reduces."""
        again, whole = recomputed(self._step, layer, policy), sum(reduced)
        forward = self._step.tasks.get(TaskType("fwd", layer), ())
        residuals = {self._step.flat.value(var) for var in self._step.residuals(layer)}
        return Recomputation(
            again.nbytes,
            self._work_of([forward[i] for i in again.positions], residuals | again.kept),
            sum(reduced[i] for i in again.positions) / whole if whole else 0.0,
        )

    def _gathered(self, var: Var, layer: int) -> int:
        """The bytes of a weight in the dtype in which a layer reads it: of its cast, if that is smaller."""
        step, task = self._step, TaskType("fwd", layer)
        read = {step.flat.value(one) for one in step.reads(task)}
        casts = [cast for cast in step.ownership.casts.get(var, ()) if step.flat.value(cast) in read]
        value = step.flat.value(var)
        if value in read:
            readers = [one.operation for one in step.tasks[task] if value in one.operation.reads]
            if any(one.eqn.primitive.name != "convert_element_type" for one in readers):
                return nbytes(var)
            casts += [one.eqn.outvars[0] for one in readers]
        return min([nbytes(var), *map(nbytes, casts)])

    def _skips(self, loop: LayeredLoop) -> Iterator[tuple[int, int, int]]:
        skipped: dict[tuple[int, int], int] = collections.Counter()
        first = loop.layers.start
        for layer in loop.layers:
            for var, source in self._step.received(layer):
                if source < layer - 1:
                    skipped[source - first, layer - first] += nbytes(var)
        yield from ((*ends, total) for ends, total in sorted(skipped.items()))

    def _work(self, task_type: TaskType) -> TaskWork:
        step = self._step
        kept = {step.flat.value(var) for var in (*step.reads(task_type), *step.makes(task_type))}
        return self._work_of(step.tasks.get(task_type, ()), kept)

    def _attention(self, loop: LayeredLoop) -> TaskWork:
        """The work on scores of plain attention, which are in memory between tasks."""
        step = self._step
        tasks = [task_type for task_type in step.tasks if task_type.stage in loop.layers]
        members = on_scores(one for task_type in tasks for one in step.tasks[task_type])
        passed = {step.flat.value(var) for task_type in tasks for var in step.makes(task_type)}
        return self._work_of(members, passed)

    def _work_of(self, members: Sequence[ClassedOperation], kept: Collection[Value]) -> TaskWork:
        return task_work(members, kept, self._nbytes_of_rows, self._step.kernel_values)

    def _nbytes_of_rows(self, value: Value) -> float:
        depends = not self._rows or not self._rows.isdisjoint(self._step.classes.of_value(value))
        return self._step.nbytes(value) if depends else 0.0
