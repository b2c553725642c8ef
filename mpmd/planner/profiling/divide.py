"""The divisions of each layer, and of the arguments of the step, for each kind."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection

from mpmd.compiler.jaxprs.flat import Value
from mpmd.ir.plan import TaskType
from mpmd.planner.all_reduces import NO_ALL_REDUCES, AllReduces, merged_sums
from mpmd.planner.layer_profile import Division, Kind
from mpmd.planner.profiling.accumulated import Accumulated
from mpmd.planner.profiling.choose_classes import choose_classes
from mpmd.planner.profiling.classes import Class
from mpmd.planner.profiling.layered_step import LayeredStep, before_loops
from mpmd.planner.profiling.microbatch import origin_of
from mpmd.planner.profiling.sharing import Shared, Sharing

_BETWEEN: tuple[Kind, ...] = ("sequence", "data")


class Divider:
    def __init__(self, step: LayeredStep):
        self._step = step
        self._accumulated = {task_type: self._accumulated_by(task_type) for task_type in step.tasks}
        self.classes = choose_classes(step, self._accumulated)
        self._sharing = {
            kind: Sharing(step.flat, step.classes, divided) for kind, divided in self.classes.items()
        }
        self.between: Kind | None = next((kind for kind in _BETWEEN if self.classes[kind]), None)
        """The kind whose dimensions sequence parallelism divides between tensor-parallel regions."""
        self._sharing_between = self._sequence_parallel_sharing()

    def _accumulated_by(self, task_type: TaskType) -> Accumulated:
        step = self._step
        updated = {step.flat.value(a.updated) for a in step.graph.accumulators if a.work == task_type}
        makes = {step.flat.value(var) for var in step.makes(task_type)}
        members = [one.operation for one in step.tasks[task_type]]
        return Accumulated(members, step.flat.passed, updated, makes)

    def of_layer(self, layer: int) -> dict[Kind, Division]:
        divisions = {kind: self._division(layer, kind, sharing) for kind, sharing in self._sharing.items()}
        return {kind: division for kind, division in divisions.items() if division is not None}

    def sequence_parallel(self, layer: int, plain: Division | None) -> Division | None:
        """The division of a layer along ``model`` if values between regions are, too; ``None`` for none.

        Args:
          plain: the division of the layer if these values are whole.
        """
        if plain is None or self._sharing_between is None:
            return None
        division = self._division(layer, "model", self._sharing_between)
        if division is None or division.activations <= plain.activations:
            return None
        return dataclasses.replace(division, largest=plain.largest, weights=plain.weights)

    def _sequence_parallel_sharing(self) -> Sharing | None:
        if self.between is None or not self.classes["model"]:
            return None
        rows = self.classes["data"] if self.between == "sequence" else frozenset[Class]()
        between = self.classes[self.between]
        return Sharing(self._step.flat, self._step.classes, self.classes["model"], between, rows)

    def _division(self, layer: int, kind: Kind, sharing: Sharing) -> Division | None:
        step, weights = self._step, self._step.weights(layer)
        task_types = [task_type for task_type in step.tasks if task_type.stage == layer]
        members = [member for task_type in task_types for member in step.tasks[task_type]]
        values = set(weights).union(*(member.operation.values for member in members))
        largest = sharing.largest(values)
        if largest <= 1:
            return None
        shared = {task_type: self._shared(task_type, kind, sharing) for task_type in task_types}
        all_reduces = {of_task[0].kind: self._all_reduces(*of_task) for of_task in shared.items()}
        kept = [step.flat.value(var) for var in step.residuals(layer)]
        received = [step.flat.value(var) for var, _ in step.received(layer)]
        operations = sum(step.operations[task_type] for task_type in task_types)
        return Division(
            largest,
            operations=sum(of_task.operations for of_task in shared.values()) / max(1, operations),
            weights=self._share(weights, sharing),
            activations=self._share(kept + received, sharing),
            received=self._share(received, sharing),
            forward=all_reduces.get("fwd", NO_ALL_REDUCES),
            backward=all_reduces.get("bwd", NO_ALL_REDUCES),
            summed_gradients=sum(
                step.nbytes(value)
                for task_type, of_task in shared.items()
                if task_type.kind == "bwd"
                for value in of_task.summed
                if value in self._accumulated[task_type]
            ),
            reduced_per_step=sum(self._nbytes_per_step(*of_task) for of_task in shared.items()),
        )

    def reduced(self, layer: int) -> list[float]:
        return [
            sum(sharing.task([member], ()).all_reduces.nbytes for sharing in self._sharing.values())
            for member in self._step.tasks.get(TaskType("fwd", layer), ())
        ]

    def _all_reduces(self, task_type: TaskType, shared: Shared) -> AllReduces:
        makes = {self._step.flat.value(var) for var in self._step.makes(task_type)}
        members = [one.operation for one in self._step.tasks[task_type]]
        operations = [(one.eqn, one.reads, one.makes, one.times) for one in members]
        summed = {value: AllReduces(self._step.nbytes(value), 1.0) for value in shared.summed}
        summed |= {value: AllReduces(self._step.nbytes(value) / 2, 0.5) for value in shared.scattered}
        return merged_sums(operations, summed, makes).plus(shared.all_reduces)

    def _shared(self, task_type: TaskType, kind: Kind, sharing: Sharing) -> Shared:
        """Accumulators hold parts of sums only over devices that divide the batch."""
        accumulated = self._accumulated[task_type] if kind != "model" else frozenset[Value]()
        return sharing.task(self._step.tasks[task_type], accumulated)

    def _nbytes_per_step(self, task_type: TaskType, shared: Shared) -> float:
        return sum(map(self._step.nbytes, self._accumulated[task_type].updated_by(shared.partial)))

    def _share(self, values: Collection[Value], sharing: Sharing) -> float:
        nbytes = {value: self._step.nbytes(value) for value in values}
        divided = sum(nbytes[value] for value in nbytes if sharing.dim(value) is not None)
        return divided / max(1.0, sum(nbytes.values()))

    def specs(self) -> dict[Kind, dict[int, int]]:
        dims: dict[Kind, dict[int, int]] = {kind: {} for kind in self.classes}
        step = self._step
        leaf_of, before = step.leaf_of_argument(), before_loops(step.graph)
        for kind, sharing in self._sharing.items():
            like = {**{var: var for var in step.ownership.weights}, **step.ownership.like}
            for var, weight in like.items():
                dim = sharing.dim(step.flat.value(weight))
                if var in leaf_of and dim is not None:
                    dims[kind][leaf_of[var]] = dim
            for taken in itertools.chain.from_iterable(loop.microbatch for loop in step.loops):
                if step.classes.of(taken.value, taken.dim) in self.classes[kind]:
                    origin = origin_of(taken.batch, taken.batch_dim, before)
                    if origin is not None and origin[0] in leaf_of:
                        dims[kind].setdefault(leaf_of[origin[0]], origin[1])
        return dims
