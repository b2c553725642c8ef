"""Resolves the specs that a plan leaves open, by having the groups compile.

Executables with open specs are compiled on the groups, each as soon as its input specs are known. What their
compilers choose becomes the specs of the plan.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

from mpmd.ir.names import resharded_name
from mpmd.ir.plan import Executable, GroupProgram, Instruction, Name, Plan, Recv, Run, Spec
from mpmd.ir.specs import fitting
from mpmd.program import Function, Program, Variant

_Unknown = tuple[int, Name] | Variant
"""The spec of a value on a group, or the output specs of a variant, for which an instruction waits."""

Compile = Callable[[int, Executable, Function], Future[tuple[Spec, ...]]]
"""``(mpmd_idx, executable, function)``: asks a group to compile and keep an executable with known input
specs.

The result holds the executable's output specs, including the specs that the group's compiler has chosen.
"""


def resolve_specs(program: Program, compile: Compile) -> Program:
    """Returns the program with every spec of its plan known.

    An executable that reads differently sharded values becomes several. Every group has then compiled its
    executables. A plan without open specs, such as a plan for one-device groups, is returned unchanged,
    without compiling.
    """
    plan = program.plan
    if all(None not in (*e.in_specs, *e.out_specs) for e in plan.executables):
        return program
    return compile_all(program, compile)


def compile_all(program: Program, compile: Compile) -> Program:
    """As ``resolve_specs``; executables are also compiled where no spec is open.

    Values are followed from producer to reader, across groups: a reader takes a value in the sharding that
    its producer gives it, or, on a submesh on which that does not fit, replicated. Each group compiles each
    of its variants once. The first group that has a variant to compile chooses its output specs. Groups
    compile at the same time: an executable waits only for the executables that compute its inputs, and only
    if these choose their output specs.
    """
    choice = _Chooser(program, compile)
    choice.run()
    plan = program.plan
    resolved: dict[Variant, Executable] = {}
    numbers: collections.Counter[str] = collections.Counter()
    for group in plan.programs:
        for run in group.runs:
            variant = choice.variants[group.mpmd_idx, run]
            if variant not in resolved:
                resolved[variant] = dataclasses.replace(
                    plan.executable(run.executable),
                    name=resharded_name(run.executable, numbers[run.executable]),
                    in_specs=variant[1],
                    out_specs=choice.out_specs[variant],
                )
                numbers[run.executable] += 1

    def renamed(instruction: Instruction, mpmd_idx: int) -> Instruction:
        if not isinstance(instruction, Run):
            return instruction
        return dataclasses.replace(
            instruction, executable=resolved[choice.variants[mpmd_idx, instruction]].name
        )

    resolved_plan = dataclasses.replace(
        plan,
        programs=tuple(
            GroupProgram(i, tuple(renamed(instruction, i) for instruction in group.instructions))
            for i, group in enumerate(plan.programs)
        ),
        executables=tuple(resolved.values()),
        outputs=tuple(
            dataclasses.replace(leaf, spec=choice.specs[leaf.mpmd_idxs[0], leaf.name])
            for leaf in plan.outputs
        ),
    )
    return dataclasses.replace(
        program,
        plan=resolved_plan,
        functions={e.name: program.functions[name] for (name, _), e in resolved.items()},
        compiled={e.name: variant for variant, e in resolved.items()},
    )


def _specs_at_start(plan: Plan) -> dict[tuple[int, Name], Spec]:
    inputs = ((leaf.mpmd_idxs, leaf.name, leaf.spec) for leaf in plan.inputs if leaf.name)
    constants = ((leaf.mpmd_idxs, leaf.name, ()) for leaf in plan.constants)
    return {(mpmd_idx, name): spec for groups, name, spec in (*inputs, *constants) for mpmd_idx in groups}


class _Chooser:
    """Has groups compile all executables.

    Attributes:
      variants: the variant that each group runs, by the group and the run.
      out_specs: the output specs of each variant, as the first group's compiler chose them.
      specs: the spec of each value on each group that holds it.
    """

    def __init__(self, program: Program, compile: Compile):
        self._plan = program.plan
        self._functions = program.functions
        self._compile = compile
        self._avals = program.plan.avals()
        self.specs = _specs_at_start(program.plan)
        self.variants: dict[tuple[int, Run], Variant] = {}
        self.out_specs: dict[Variant, tuple[Spec, ...]] = {}
        self._asked: dict[Variant, set[int]] = collections.defaultdict(set)  # the groups
        self._compiling: dict[Future[tuple[Spec, ...]], Variant] = {}
        self._ready = collections.deque(
            (group.mpmd_idx, instruction)
            for group in program.plan.programs
            for instruction in group.instructions
            if isinstance(instruction, Run | Recv)
        )
        self._waiting: dict[_Unknown, list[tuple[int, Run | Recv]]] = collections.defaultdict(list)

    def run(self) -> None:
        while self._ready or self._compiling:
            if not self._ready:
                self._wait_for_compiler()
                continue
            mpmd_idx, instruction = self._ready.popleft()
            if isinstance(instruction, Run):
                unknown = self._resolve_run(mpmd_idx, instruction)
            else:
                unknown = self._resolve_recv(mpmd_idx, instruction)
            if unknown is not None:
                self._waiting[unknown].append((mpmd_idx, instruction))
        assert not self._waiting, "the programs wait for one another: verify should have refused them"

    def _wait_for_compiler(self) -> None:
        done, _ = concurrent.futures.wait(self._compiling, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            variant = self._compiling.pop(future)
            self.out_specs.setdefault(variant, future.result())
            self._ready.extend(self._waiting.pop(variant, ()))

    def _know(self, mpmd_idx: int, name: Name, spec: Spec) -> None:
        self.specs[mpmd_idx, name] = spec
        self._ready.extend(self._waiting.pop((mpmd_idx, name), ()))

    def _resolve_recv(self, mpmd_idx: int, recv: Recv) -> _Unknown | None:
        sizes = self._plan.submesh(mpmd_idx)
        for name in recv.values:
            spec = self.specs.get((recv.src, name))
            if spec is None:
                return recv.src, name
            self._know(mpmd_idx, name, fitting(spec, self._avals[name].shape, sizes))
        return None

    def _resolve_run(self, mpmd_idx: int, run: Run) -> _Unknown | None:
        executable = self._plan.executable(run.executable)
        in_specs: list[Spec] = []
        for name, spec in zip(run.inputs, executable.in_specs, strict=True):
            known = self.specs.get((mpmd_idx, name)) if spec is None else spec
            if known is None:
                return mpmd_idx, name
            in_specs.append(known)
        variant = self.variants[mpmd_idx, run] = (run.executable, tuple(in_specs))
        if None not in executable.out_specs:
            self.out_specs[variant] = executable.out_specs  # type: ignore[assignment]
        chosen, asked = self.out_specs.get(variant), self._asked[variant]
        if mpmd_idx not in asked and (chosen is not None or not asked):
            asked.add(mpmd_idx)
            executable = dataclasses.replace(
                executable, in_specs=variant[1], out_specs=executable.out_specs if chosen is None else chosen
            )
            self._compiling[self._compile(mpmd_idx, executable, self._functions[executable.name])] = variant
        if chosen is None:
            return variant
        for name, spec in zip(run.outputs, chosen, strict=True):
            self._know(mpmd_idx, name, spec)
        return None
