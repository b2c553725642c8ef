"""Says where a compiled step has its values, and why: the tasks and the user's lines that read and make them.

Everything is read off the plan that runs, and off the equations that its tasks were made of.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr

from mpmd.explanation import Edge, Explanation, Input, Output, Sent, TaskSummary, Use
from mpmd.ir import InputLeaf, Name, OutputLeaf, Plan, Run, Send
from mpmd.provenance import Code, lines_of
from mpmd.step import LoadedStep


def explain(step: LoadedStep) -> Explanation:
    """Explains a step that ``mpmd_jit_with_loop(...).compile(...)`` returned.

    ``print(mpmd.explain(step))`` is an overview: where arguments and results are, what is sent, and what the
    tasks do. ``print(mpmd.explain(step).leaf("params['w']"))`` tells all about one of them.
    """
    if not isinstance(step, LoadedStep):
        raise TypeError(f"explain takes a compiled step, mpmd_jit_with_loop(...).compile(...), not {step!r}")
    compiled = step.compiled
    return _Analysis(step.plan, compiled.program.jaxprs, compiled.traced.fed_back).explanation()


class _Analysis:
    def __init__(
        self, plan: Plan, jaxprs: Mapping[tuple[int, str], Jaxpr], fed_back: Iterable[tuple[int, int]]
    ):
        self._plan = plan
        self._avals = plan.avals()
        self._arguments = {leaf.name: leaf.path for leaf in plan.inputs if leaf.name}
        self._result_paths = [f"result{leaf.path}" for leaf in plan.outputs]
        self._updated = {plan.inputs[i].path: self._result_paths[j] for i, j in fed_back}
        self._updates = {result: path for path, result in self._updated.items()}
        codes = {id(jaxpr): Code(jaxpr) for jaxpr in jaxprs.values()}
        self._codes = {key: codes[id(jaxpr)] for key, jaxpr in jaxprs.items()}
        self._makers: dict[Name, dict[int, tuple[Run, int]]] = collections.defaultdict(dict)
        self._readers: dict[tuple[int, Name], list[tuple[Run, int]]] = collections.defaultdict(list)
        for group, run in self._runs():
            for position, name in enumerate(run.outputs):
                self._makers[name][group] = run, position
            for position, name in enumerate(run.inputs):
                self._readers[group, name].append((run, position))

    def explanation(self) -> Explanation:
        return Explanation(
            tuple(map(self._input, self._plan.inputs)),
            tuple(map(self._output, self._plan.outputs, self._result_paths)),
            tuple(self._edges()),
            tuple(self._tasks()),
        )

    def _runs(self) -> Iterator[tuple[int, Run]]:
        for program in self._plan.programs:
            for instruction in program.instructions:
                if isinstance(instruction, Run):
                    yield program.mpmd_idx, instruction

    # Leaves.

    def _input(self, leaf: InputLeaf) -> Input:
        read_by = [self._reading(group, leaf.name) for group in leaf.mpmd_idxs if leaf.name]
        return Input(
            leaf.path,
            leaf.aval,
            leaf.mpmd_idxs,
            leaf.spec,
            leaf.donated,
            tuple(itertools.chain.from_iterable(read_by)),
            self._updated.get(leaf.path),
        )

    def _output(self, leaf: OutputLeaf, path: str) -> Output:
        arguments, tasks = self._made_of(leaf.name)
        return Output(
            path,
            leaf.aval,
            leaf.mpmd_idxs,
            leaf.spec,
            tuple(self._making(leaf.name, group) for group in sorted(self._makers.get(leaf.name, ()))),
            arguments,
            tasks,
            self._updates.get(path),
        )

    def _reading(self, group: int, name: Name) -> list[Use]:
        """The tasks on a group that read a value, each once for all microbatches."""
        positions: dict[tuple[str, bool], dict[tuple[Code, int], None]] = {}
        for run, position in self._readers[group, name]:
            task = _task(run.label), _in_loop(run.label)
            positions.setdefault(task, {})[self._codes[group, run.label], position] = None
        return [
            Use(
                task,
                group,
                in_loop,
                tuple(dict.fromkeys(line for code, i in found for line in code.lines_reading(i))),
            )
            for (task, in_loop), found in positions.items()
        ]

    def _making(self, name: Name, group: int) -> Use:
        run, position = self._makers[name][group]
        code = self._codes[group, run.label]
        return Use(_task(run.label), group, _in_loop(run.label), code.lines_making(position))

    def _made_of(self, name: Name) -> tuple[tuple[str, ...], tuple[Use, ...]]:
        """The arguments and the tasks' results that a value was made of outside the loop.

        Only values of its size are followed: what a weight's update shares with it, rather than the scalars
        that every update reads.
        """
        arguments: dict[str, None] = {}
        summed: dict[Use, None] = {}
        first: dict[Use, None] = {}
        seen, stack = {name}, [name]
        while stack:
            name = stack.pop()
            if name in self._arguments:
                arguments[self._arguments[name]] = None
            for group, (run, position) in sorted(self._makers.get(name, {}).items()):
                if _in_loop(run.label):
                    summed[self._making(name, group)] = None
                    continue
                inputs, sources = self._codes[group, run.label].made_of(position)
                first |= dict.fromkeys(Use(_task(run.label), group, False, lines_of(eqn)) for eqn in sources)
                names = [run.inputs[i] for i in inputs if run.inputs[i] not in seen]
                seen.update(names)
                stack.extend(reversed(names))
        return tuple(arguments), tuple(summed) or (() if arguments else tuple(first))

    # Edges and tasks.

    def _edges(self) -> Iterator[Edge]:
        kept_as: dict[tuple[int, Name], list[str]] = collections.defaultdict(list)
        for leaf, path in zip(self._plan.outputs, self._result_paths, strict=True):
            for group in leaf.mpmd_idxs:
                kept_as[group, leaf.name].append(path)
        sent: dict[tuple[int, int], dict[Any, list[Name]]] = {}
        for program in self._plan.programs:
            for instruction in program.instructions:
                if isinstance(instruction, Send):
                    values = sent.setdefault((program.mpmd_idx, instruction.dst), {})
                    for name in instruction.values:
                        run, position = self._makers[name][program.mpmd_idx]
                        code = self._codes[program.mpmd_idx, run.label]
                        values.setdefault((id(code), position), []).append(name)
        for (src, dst), values in sorted(sent.items()):
            yield Edge(
                src,
                dst,
                tuple(
                    Sent(
                        self._avals[name],
                        len(names),
                        self._making(name, src),
                        tuple(self._reading(dst, name)),
                        tuple(kept_as[dst, name]),
                    )
                    for names in values.values()
                    for name in names[:1]
                ),
            )

    def _tasks(self) -> Iterator[TaskSummary]:
        runs: dict[tuple[int, str, int], list[Run]] = collections.defaultdict(list)
        for group, run in self._runs():
            runs[group, _task(run.label), id(self._codes[group, run.label])].append(run)
        for (group, task, _), equal in runs.items():
            executable = self._plan.executable(equal[0].executable)
            yield TaskSummary(
                task,
                group,
                len(equal),
                executable.name,
                sum(aval.nbytes for aval in executable.inputs),
                sum(aval.nbytes for aval in executable.outputs),
                sum(executable.inputs[i].nbytes for i in executable.donated),
                self._codes[group, equal[0].label].functions(),
            )


def _task(label: str) -> str:
    """A task without its microbatch."""
    return re.sub(r"__\d+", "", label)


def _in_loop(label: str) -> bool:
    return _task(label) != label
