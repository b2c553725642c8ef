"""A step cut into layers: each stage is a layer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.graph import StageWork, TaskGraph
from mpmd.compiler.jaxprs.disjoint_sets import DisjointSets
from mpmd.compiler.jaxprs.flat import FlatEquations, Operation, Value
from mpmd.compiler.jaxprs.kernels import NO_KERNEL_VALUES, KernelValues, kernel_values
from mpmd.compiler.steps import Loop
from mpmd.ir.plan import TaskType
from mpmd.ir.stack import per_layer_range
from mpmd.planner.profiling.classes import ClassedOperation, DimensionClasses, classed
from mpmd.planner.profiling.microbatch import MicrobatchDim, microbatch_dims, rows_to_cut
from mpmd.planner.profiling.ownership import Ownership, ownership_of


@dataclasses.dataclass(frozen=True)
class LayeredLoop:
    """The layers of a loop.

    Attributes:
      layers: the numbers of its layers, which are counted through all loops.
      microbatch: the dimensions of a microbatch that have several elements.
      num_microbatches: the number of microbatches of the loop.
      decision_index: the index of the decisions under which it was traced.
      rows: of each microbatch, as ``mpmd.microbatches`` has cut them; 0 where it has not.
      is_open: whether it has as many microbatches as is decided.
    """

    layers: range
    microbatch: Sequence[MicrobatchDim]
    num_microbatches: int
    decision_index: int
    rows: int = 0
    is_open: bool = False

    @property
    def divisible(self) -> list[MicrobatchDim]:
        """The dimensions of a microbatch of which devices may divide one as its rows.

        They are all of a batch that the user cuts, as it may begin with a sequence, and the first one of a
        batch that is cut as is decided: the number of microbatches divides the same rows.
        """
        if self.is_open or self.rows * self.num_microbatches == 1:
            return [dim for dim in self.microbatch if dim.batch_dim == 1]
        return list(self.microbatch)


@dataclasses.dataclass(frozen=True)
class LayeredStep:
    """A step cut into layers.

    Attributes:
      graph: its tasks; each stage is a layer.
      ownership: the layers to which arguments belong.
      flat, classes: the values of its tasks and of equations before loops, with classes of dimensions.
      tasks: the operations of each task.
      loops: in order.
    """

    graph: TaskGraph
    ownership: Ownership
    flat: FlatEquations
    classes: DimensionClasses
    tasks: Mapping[TaskType, Sequence[ClassedOperation]]
    loops: Sequence[LayeredLoop]

    @property
    def num_layers(self) -> int:
        return sum(len(loop.layers) for loop in self.loops)

    @functools.cached_property
    def operations(self) -> dict[TaskType, float]:
        return {task_type: sum(one.work for one in members) for task_type, members in self.tasks.items()}

    def reads(self, task_type: TaskType) -> tuple[Var, ...]:
        return self._members[task_type].reads if task_type in self._members else ()

    def makes(self, task_type: TaskType) -> tuple[Var, ...]:
        return self._members[task_type].makes if task_type in self._members else ()

    @functools.cached_property
    def _members(self) -> dict[TaskType, StageWork]:
        return {member.work: member for member in self.graph.stage_work}

    @functools.cached_property
    def _made_by(self) -> dict[Var, TaskType]:
        return {var: member.work for member in self.graph.stage_work for var in member.makes}

    def residuals(self, layer: int) -> Iterator[Var]:
        for var in self.reads(TaskType("bwd", layer)):
            maker = self._made_by.get(var)
            is_kept = self.flat.value(var) not in self.kernel_values.inside
            if maker is not None and maker.kind == "fwd" and is_kept:
                yield var

    def received(self, layer: int) -> Iterator[tuple[Var, int]]:
        for var in self.reads(TaskType("fwd", layer)):
            maker = self._made_by.get(var)
            if maker is not None and maker.stage != layer:
                yield var, maker.stage

    @functools.cached_property
    def passed_from(self) -> Mapping[Value, list[Value]]:
        sources: dict[Value, list[Value]] = {}
        for passed in self.flat.passed:
            target, source = (passed.inner, passed.outer) if passed.into else (passed.outer, passed.inner)
            sources.setdefault(target, []).append(source)
        return sources

    @functools.cached_property
    def kernel_values(self) -> KernelValues[Value]:
        operations = [one.operation for members in self.tasks.values() for one in members]
        if all(operation.kernel is None for operation in operations):
            return NO_KERNEL_VALUES
        same: DisjointSets[Value] = DisjointSets()
        for one in self.flat.passed:
            same.join((one.outer, one.inner))
        found = kernel_values(
            (
                operation.kernel,
                [same.find(value) for value in operation.reads if value is not None],
                [same.find(value) for value in operation.makes],
            )
            for operation in operations
        )
        values = range(len(self.flat.avals))
        return KernelValues(
            *(frozenset(value for value in values if same.find(value) in one) for one in found)
        )

    def weights(self, layer: int) -> list[Value]:
        return [self.flat.value(var) for var in self.ownership.weights_of(layer)]

    def leaf_of_argument(self) -> dict[Var, int]:
        """The position of each argument's leaf; a stacked leaf has several arguments."""
        step = self.graph.step
        positions = per_layer_range(step.argument_leaves, range(len(step.argument_leaves)))
        return {argument.var: i for argument, i in zip(step.arguments, positions, strict=True)}

    def nbytes(self, value: Value) -> float:
        aval = self.flat.avals[value]
        return float(math.prod(aval.shape) * aval.dtype.itemsize)


def layered(graph: TaskGraph, flash_attention: bool = False) -> LayeredStep:
    ownership = ownership_of(graph)
    flat = FlatEquations(flash_attention=flash_attention)
    before = flat.add(before_loops(graph))
    tasks = {member.work: flat.add(member.eqns) for member in graph.stage_work}
    loops = [
        _layered_loop(loop, microbatch_dims(flat, _within(tasks, loop.stages), ownership.sliced))
        for loop in graph.step.loops
    ]
    return with_classes(graph, ownership, flat, tasks, before, loops)


def _layered_loop(loop: Loop, dims: Sequence[MicrobatchDim]) -> LayeredLoop:
    return LayeredLoop(
        layers=loop.stages,
        microbatch=[dim for dim in dims if dim.size > 1],
        num_microbatches=loop.num_microbatches,
        decision_index=loop.decision_index,
        rows=rows_to_cut(dims, loop.num_microbatches),
    )


def before_loops(graph: TaskGraph) -> list[JaxprEqn]:
    """The equations before the first loop, and between loops."""
    return [*itertools.chain(*graph.step.outside[:-1])]


def _within(tasks: Mapping[TaskType, Sequence[Operation]], layers: range) -> Iterator[Operation]:
    for task_type, members in tasks.items():
        if task_type.stage in layers:
            yield from members


def with_classes(
    graph: TaskGraph,
    ownership: Ownership,
    flat: FlatEquations,
    tasks: Mapping[TaskType, Sequence[Operation]],
    before: Sequence[Operation],
    loops: Sequence[LayeredLoop],
) -> LayeredStep:
    """The step with the classes of its dimensions.

    Args:
      flat: to which the operations of the tasks, and those before loops, have been added.
    """
    for var in ownership.weights:
        flat.value(var)  # classes are of the values that are numbered by now
    classes, members = classed(flat, tasks, before, _parts(graph, flat, ownership))
    return LayeredStep(graph, ownership, flat, classes, members, loops)


def _parts(graph: TaskGraph, flat: FlatEquations, ownership: Ownership) -> list[list[tuple[Value, int]]]:
    """Dimensions that are one and the same, since parts of one argument have one spec."""
    same = []
    arguments = iter(graph.step.arguments)
    for leaf in graph.step.argument_leaves:
        parts = [argument.var for argument in itertools.islice(arguments, len(leaf.names))]
        read = [flat.value(var) for var in parts if var in ownership.weights]
        if leaf.stack is not None and len(read) > 1:
            dims = (dim for dim in range(len(leaf.shape)) if dim != leaf.stack.axis)
            same += [[(value, dim) for value in read] for dim in dims]
    return same
