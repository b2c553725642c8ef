"""The divisions of each layer, and of the arguments of the step, for each kind."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from mpmd.compiler.jaxprs.flat import Value
from mpmd.ir.plan import TaskType
from mpmd.planner.layer_profile import Division, Kind
from mpmd.planner.merged_sums import Merged, merged_sums
from mpmd.planner.profiling.accumulated import Accumulated
from mpmd.planner.profiling.choose_classes import choose_classes
from mpmd.planner.profiling.classes import Class, ClassedOperation
from mpmd.planner.profiling.layered_step import LayeredStep, before_loops
from mpmd.planner.profiling.microbatch import origin_of
from mpmd.planner.profiling.sharing import Shared, Sharing

_BETWEEN: tuple[Kind, ...] = ("sequence", "data")


class Divider:
    """The divisions of a step's layers."""

    def __init__(self, step: LayeredStep):
        self._step = step
        self._operations = {
            task_type: sum(one.operation.times * one.work for one in members)
            for task_type, members in step.tasks.items()
        }
        self._accumulated = {task_type: self._accumulated_by(task_type) for task_type in step.tasks}
        self.classes = choose_classes(step, self._operations, self._accumulated)
        self._sharing = {
            kind: Sharing(step.flat, step.classes, divided) for kind, divided in self.classes.items()
        }
        self.between: Kind | None = next((kind for kind in _BETWEEN if self.classes[kind]), None)
        """The kind whose dimensions sequence parallelism divides between tensor-parallel regions."""
        self._sharing_between = self._with_values_between()

    def _accumulated_by(self, task_type: TaskType) -> Accumulated:
        step = self._step
        updated = {step.flat.value(a.updated) for a in step.graph.accumulators if a.work == task_type}
        makes = {step.flat.value(var) for var in step.makes(task_type)}
        members = [one.operation for one in step.tasks[task_type]]
        return Accumulated(members, step.flat.passed, updated, makes)

    def of_layer(self, layer: int) -> dict[Kind, Division]:
        """The divisions of a layer, by kind."""
        divisions = ((kind, self._division(layer, kind)) for kind in self.classes)
        return {kind: division for kind, division in divisions if division is not None}

    def sequence_parallel(self, layer: int) -> Division | None:
        """The division of a layer along ``model`` if values between regions are, too; ``None`` for none."""
        plain = self._division(layer, "model")
        if plain is None or self._sharing_between is None:
            return None
        division = self._division(layer, "model", self._sharing_between)
        if division is None or division.activations <= plain.activations:
            return None
        return dataclasses.replace(division, largest=plain.largest, weights=plain.weights)

    def _with_values_between(self) -> Sharing | None:
        """The sharing along ``model`` under sequence parallelism."""
        if self.between is None or not self.classes["model"]:
            return None
        rows = self.classes["data"] if self.between == "sequence" else frozenset[Class]()
        between = self.classes[self.between]
        return Sharing(self._step.flat, self._step.classes, self.classes["model"], between, rows)

    def _division(self, layer: int, kind: Kind, sharing: Sharing | None = None) -> Division | None:
        """The division of a layer; ``None`` if there is nothing to divide."""
        step, sharing = self._step, sharing or self._sharing[kind]
        task_types = [
            task_type
            for task_type in (TaskType("fwd", layer), TaskType("bwd", layer))
            if task_type in step.tasks
        ]
        shared = {task_type.kind: self._shared(task_type, kind, sharing) for task_type in task_types}
        forward, backward = shared.get("fwd", Shared()), shared.get("bwd", Shared())
        merged = {"fwd": Merged(), "bwd": Merged()}
        merged |= {
            task_type.kind: self._merged(task_type, shared[task_type.kind]) for task_type in task_types
        }
        weights = step.weights(layer)
        kept = [step.flat.value(var) for var in step.residuals(layer)]
        received = [step.flat.value(var) for var, _ in step.received(layer)]
        operations = sum(self._operations[task_type] for task_type in task_types)
        division = Division(
            largest=math.gcd(*self._sizes(task_types, weights, sharing)),
            operations=(forward.operations + backward.operations) / max(1, operations),
            weights=self._share(weights, sharing),
            activations=self._share(kept + received, sharing),
            reduced_forward=forward.reduced,
            reduced_backward=backward.reduced,
            received=self._share(received, sharing),
            reduced_per_step=sum(
                self._nbytes_per_step(task_type, shared[task_type.kind]) for task_type in task_types
            ),
            all_reduces_forward=forward.all_reduces,
            all_reduces_backward=backward.all_reduces,
            merged_forward=merged["fwd"].nbytes,
            merged_backward=merged["bwd"].nbytes,
            merges_forward=merged["fwd"].number,
            merges_backward=merged["bwd"].number,
        )
        return division if division.largest > 1 else None

    def reduced_share(self, layer: int, operations: Sequence[ClassedOperation]) -> float:
        """The share of the bytes that a layer's forward all-reduces that is of some of its operations."""
        forward = self._step.tasks.get(TaskType("fwd", layer), ())
        whole = sum(self._reduced(kind, forward) for kind in self.classes)
        return sum(self._reduced(kind, operations) for kind in self.classes) / whole if whole else 0.0

    def _reduced(self, kind: Kind, operations: Sequence[ClassedOperation]) -> float:
        return self._sharing[kind].task(operations, frozenset()).reduced

    def _merged(self, task_type: TaskType, shared: Shared) -> Merged:
        """The savings of merged all-reduces in a task."""
        makes = {self._step.flat.value(var) for var in self._step.makes(task_type)}
        members = [one.operation for one in self._step.tasks[task_type]]
        operations = [(one.eqn, one.reads, one.makes, one.times) for one in members]
        of_all = merged_sums(operations, shared.summed, makes, self._step.nbytes)
        halves = merged_sums(operations, shared.scattered, makes, lambda value: self._step.nbytes(value) / 2)
        return Merged(of_all.nbytes + halves.nbytes, of_all.number + halves.number / 2)

    def _shared(self, task_type: TaskType, kind: Kind, sharing: Sharing) -> Shared:
        """The shared task. Accumulators hold parts of sums only over devices that divide the batch."""
        accumulated = self._accumulated[task_type] if kind != "model" else frozenset[Value]()
        return sharing.task(self._step.tasks[task_type], accumulated)

    def _nbytes_per_step(self, task_type: TaskType, shared: Shared) -> float:
        """The bytes of the accumulators that hold parts of sums."""
        return sum(map(self._step.nbytes, self._accumulated[task_type].updated_by(shared.partial)))

    def _sizes(self, task_types: Iterable[TaskType], weights: Iterable[Value], sharing: Sharing) -> set[int]:
        """The sizes of the divided dimensions."""
        values = set(weights)
        for task_type in task_types:
            for member in self._step.tasks[task_type]:
                values |= member.operation.values
        return {size for value in values if (size := sharing.size(value)) is not None}

    def _share(self, values: Collection[Value], sharing: Sharing) -> float:
        """The divided share of the bytes of values."""
        nbytes = {value: self._step.nbytes(value) for value in values}
        divided = sum(nbytes[value] for value in nbytes if sharing.dim(value) is not None)
        return divided / max(1.0, sum(nbytes.values()))

    def specs(self) -> dict[Kind, dict[int, int]]:
        """For each kind, the divided dimension of leaves of the arguments, by the leaf's position."""
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
