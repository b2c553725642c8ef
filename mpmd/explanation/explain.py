"""Says where the values of a compiled step are, and which tasks and lines read and make each value.

The plan that runs and the equations of its tasks enter, an ``Explanation`` leaves.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mpmd.explanation.explanation import Explanation
from mpmd.explanation.findings import (
    gathering_loops,
    groups_without_backward,
    kept_choices,
    recomputed_choices,
    values_sent_again,
)
from mpmd.explanation.leaves import InputSummary, OutputSummary
from mpmd.explanation.provenance import TaskEquations, lines_of
from mpmd.explanation.tasks import TaskSummary
from mpmd.explanation.traffic import EdgeTraffic, SentValue
from mpmd.explanation.uses import TaskUse
from mpmd.explanation.work import Jaxprs, task_work, uneven_work
from mpmd.ir.messages import sends_of
from mpmd.ir.plan import (
    AnyTask,
    FusedTask,
    InputLeaf,
    Name,
    OutputLeaf,
    OutsideTask,
    Plan,
    Run,
    Task,
    with_slice,
)
from mpmd.ir.routes import Routes, Topology
from mpmd.ir.specs import fitting
from mpmd.memory import device_bytes, sizes_on_devices
from mpmd.util.grouping import grouped


def explain_plan(
    plan: Plan,
    topology: Topology,
    jaxprs: Jaxprs,
    fed_back: Iterable[tuple[int, int]],
) -> Explanation:
    """Explains the plan that a mesh of this ``topology`` has loaded.

    ``fed_back`` pairs the position of an argument with the position of the result that takes its place.
    """
    return _IndexedPlan(plan, topology, jaxprs, fed_back).explanation()


class _IndexedPlan:
    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        jaxprs: Jaxprs,
        fed_back: Iterable[tuple[int, int]],
    ):
        self._plan = plan
        self._routes = Routes(plan, topology)
        self._jaxprs = jaxprs
        self._are_equal = functools.cache(self._compare)
        self._avals = plan.avals()
        self._sizes = [sizes_on_devices(plan, group) for group in range(len(plan.programs))]
        self._arguments = {leaf.name: leaf.path for leaf in plan.inputs if leaf.name}
        self._result_paths = [f"result{leaf.path}" for leaf in plan.outputs]
        self._updated = {plan.inputs[i].path: self._result_paths[j] for i, j in fed_back}
        self._updates = {result: path for path, result in self._updated.items()}
        results = zip(plan.outputs, self._result_paths, strict=True)
        self._kept_as = grouped(
            ((group, leaf.name), path) for leaf, path in results for group in leaf.mpmd_idxs
        )
        equations = {id(jaxpr): TaskEquations(jaxpr) for jaxpr in jaxprs.values()}
        self._equations = {key: equations[id(jaxpr)] for key, jaxpr in jaxprs.items()}
        self._makers: dict[Name, dict[int, tuple[Run, int]]] = collections.defaultdict(dict)
        runs = [(program.mpmd_idx, run) for program in plan.programs for run in program.runs]
        for group, run in runs:
            for position, name in enumerate(run.outputs):
                self._makers[name][group] = run, position
        self._readers = grouped(
            ((group, name), (run, position))
            for group, run in runs
            for position, name in enumerate(run.inputs)
        )
        self._runs = grouped(
            ((group, self._task_name(run.task), self._equations[group, run.task]), run) for group, run in runs
        )

    def explanation(self) -> Explanation:
        edges, tasks = tuple(self._edges()), tuple(self._tasks())
        by_name = {self._task_name(task): jaxpr for (_, task), jaxpr in self._jaxprs.items()}
        return Explanation(
            inputs=tuple(map(self._input, self._plan.inputs)),
            outputs=tuple(map(self._output, self._plan.outputs, self._result_paths)),
            edges=edges,
            tasks=tasks,
            findings=(
                *uneven_work(self._plan, task_work(self._plan, self._jaxprs)),
                *groups_without_backward(tasks),
                *values_sent_again(edges),
                *gathering_loops(self._plan, self._jaxprs),
                *recomputed_choices(by_name),
            ),
            loops=self._plan.loops,
            part=self._plan.part,
            choices=tuple(kept_choices(by_name)),
        )

    def _input(self, leaf: InputLeaf) -> InputSummary:
        groups = range(len(self._plan.programs))
        return InputSummary(
            **self._placed(leaf, leaf.path),
            donated=leaf.donated,
            read_by=tuple(use for group in groups if leaf.name for use in self._reading(group, leaf.name)),
            updated=self._updated.get(leaf.path),
        )

    def _output(self, leaf: OutputLeaf, path: str) -> OutputSummary:
        arguments, tasks = self._made_of(leaf.name)
        return OutputSummary(
            **self._placed(leaf, path),
            made_by=tuple(self._making(leaf.name, group) for group in sorted(self._makers[leaf.name])),
            arguments=arguments,
            tasks=tasks,
            updates=self._updates.get(path),
        )

    def _placed(self, leaf: InputLeaf | OutputLeaf, path: str) -> dict[str, Any]:
        submeshes = map(self._plan.submesh, leaf.mpmd_idxs or (0,))
        specs = ((axes, fitting(leaf.spec or (), leaf.aval.shape, axes)) for axes in submeshes)
        largest = max(device_bytes(leaf.aval, spec, axes) for axes, spec in specs)
        fields = {"path": path, "aval": leaf.aval, "mpmd_idxs": leaf.mpmd_idxs, "spec": leaf.spec}
        return {**fields, "device_bytes": largest}

    def _reading(self, group: int, name: Name) -> list[TaskUse]:
        """Lists the tasks on a group that read a value or its copy, without their microbatches."""
        positions: dict[tuple[str, tuple[int, ...]], dict[tuple[TaskEquations, int], None]] = {}
        copies: list[Name] = []
        for run, position in self._readers.get((group, name), ()):
            equations = self._equations[group, run.task]
            task = self._task_name(run.task), _stages_of(run.task)
            positions.setdefault(task, {})[equations, position] = None
            copies += [run.outputs[i] for i in equations.copies_of(position)]
        uses = []
        for (task_name, stages), readers in positions.items():
            lines = dict.fromkeys(line for made_of, i in readers for line in made_of.lines_reading(i))
            uses.append(TaskUse(task_name, group, stages, tuple(lines)))
        for copy in copies:
            uses += self._reading(group, copy)
        return uses

    def _making(self, name: Name, group: int) -> TaskUse:
        run, position = self._makers[name][group]
        lines = self._equations[group, run.task].lines_making(position)
        return TaskUse(self._task_name(run.task), group, _stages_of(run.task), lines)

    def _task_name(self, task: AnyTask) -> str:
        return with_slice(_without_microbatch(task), task, self._plan.loops)

    def _made_of(self, name: Name) -> tuple[tuple[str, ...], tuple[TaskUse, ...]]:
        """The arguments and the tasks whose results a value is made from outside the loop.

        Only values of the same size are followed: the parts of a weight's update, and not the scalars that
        every update reads.
        """
        arguments: dict[str, None] = {}
        summed: dict[TaskUse, None] = {}
        first: dict[TaskUse, None] = {}
        seen, stack = {name}, [name]
        while stack:
            name = stack.pop()
            if name in self._arguments:
                arguments[self._arguments[name]] = None
            for group, (run, position) in sorted(self._makers.get(name, {}).items()):
                if _stages_of(run.task):
                    summed[self._making(name, group)] = None
                    continue
                inputs, sources = self._equations[group, run.task].made_of(position)
                task = str(run.task)
                first |= dict.fromkeys(TaskUse(task, group, (), lines_of(eqn)) for eqn in sources)
                names = [run.inputs[i] for i in inputs if run.inputs[i] not in seen]
                seen.update(names)
                stack.extend(reversed(names))
        return tuple(arguments), tuple(summed) or (() if arguments else tuple(first))

    def _edges(self) -> Iterator[EdgeTraffic]:
        """Yields each edge with its values; the same value of all microbatches is one value."""
        sends, sent = grouped(sends_of(self._plan)), self._routes.sent_bytes()
        for edge in sorted(sends):
            values = (name for send in sends[edge] for name in send.values)
            alike = grouped((self._origin(name, edge[0]), name) for name in values)
            yield EdgeTraffic(*edge, tuple(self._sent(*edge, names) for names in alike.values()), sent[edge])

    def _origin(self, name: Name, group: int) -> Any:
        """Returns a key that a value has in common with the same value of other microbatches."""
        if group not in self._makers[name]:
            return name
        run, position = self._makers[name][group]
        return self._equations[group, run.task], position

    def _sent(self, src: int, dst: int, names: Sequence[Name]) -> SentValue:
        name = names[0]
        return SentValue(
            aval=self._avals[name],
            count=len(names),
            nbytes=sum(self._routes.of_value((src, dst), name).nbytes for name in names),
            made_by=self._making(name, src) if src in self._makers[name] else None,
            read_by=tuple(self._reading(dst, name)),
            kept_as=tuple(self._kept_as.get((dst, name), ())),
            is_repeated=len(names) > 1 and self._are_equal(names[0], names[1]),
        )

    def _compare(self, name: Name, other: Name) -> bool:
        """Tells whether equal equations compute two values from operands that are equal, too."""
        if name == other:
            return True
        for group in self._makers[name].keys() & self._makers[other].keys():
            (run, position), (other_run, other_position) = (self._makers[n][group] for n in (name, other))
            equations = self._equations[group, run.task]
            if equations is self._equations[group, other_run.task] and position == other_position:
                pairs = ((run.inputs[i], other_run.inputs[i]) for i in equations.inputs_of(position))
                return all(self._are_equal(*pair) for pair in pairs)
        return False

    def _tasks(self) -> Iterator[TaskSummary]:
        for (group, task, equations), equal in self._runs.items():
            run, executable = equal[0], self._plan.executable(equal[0].executable)
            inputs, outputs = (
                [self._sizes[group][name] for name in some] for some in (run.inputs, run.outputs)
            )
            yield TaskSummary(
                task=task,
                mpmd_idx=group,
                runs=len(equal),
                executable=executable.name,
                input_bytes=sum(inputs),
                output_bytes=sum(outputs),
                donated_bytes=sum(inputs[i] for i in executable.donated),
                temporary_bytes=executable.memory.temporaries if executable.memory else None,
                functions=equations.functions(),
            )


def _without_microbatch(task: AnyTask) -> str:
    if isinstance(task, FusedTask):
        return f"FusedTask({', '.join(str(member.type) for member in task.tasks)})"
    return str(task.type if isinstance(task, Task) else task)


def _stages_of(task: AnyTask) -> tuple[int, ...]:
    return () if isinstance(task, OutsideTask) else tuple(member.stage for member in task.tasks)
