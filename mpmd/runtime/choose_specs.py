"""Compiles executables with open specs on the groups, each as soon as its input specs are known."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from mpmd.ir.plan import Executable, Name, Plan, Recv, Run, Spec
from mpmd.ir.specs import fitting
from mpmd.program import Function, Program, Variant

Compile = Callable[[int, Executable, Function], Future[tuple[Spec, ...]]]
"""``(mpmd_idx, executable, function)``: asks a group to compile and keep an executable with known input
specs.

The result holds the executable's output specs, including the specs that the group's compiler has chosen.
"""


@dataclasses.dataclass(frozen=True)
class ChosenSpecs:
    """The specs that the groups' compilers chose, and the executables that they compiled for them.

    Attributes:
      variants: the variant that each group runs, by the group and the run.
      out_specs: the output specs of each variant.
      specs: the spec of each value on each group that holds it.
    """

    variants: Mapping[tuple[int, Run], Variant]
    out_specs: Mapping[Variant, tuple[Spec, ...]]
    specs: Mapping[tuple[int, Name], Spec]


def choose_specs(program: Program, compile: Compile) -> ChosenSpecs:
    """Compiles all executables of groups, and returns the choices of their compilers.

    Values are followed from producer to reader, across groups: a reader takes a value in the sharding that
    its producer gives it, or, on a submesh on which that does not fit, replicated. Each group compiles each
    of its variants once. The first group that has a variant to compile chooses its output specs. Groups
    compile at the same time: an executable waits only for the executables that compute its inputs, and only
    if these choose their output specs.
    """
    return _Chooser(program, compile).run()


def _specs_at_start(plan: Plan) -> dict[tuple[int, Name], Spec]:
    """For each group and value that it holds before the step, the value's spec there."""
    inputs = ((leaf.mpmd_idxs, leaf.name, leaf.spec) for leaf in plan.inputs if leaf.name)
    constants = ((leaf.mpmd_idxs, leaf.name, ()) for leaf in plan.constants)
    return {(mpmd_idx, name): spec for groups, name, spec in (*inputs, *constants) for mpmd_idx in groups}


class _Chooser:
    def __init__(self, program: Program, compile: Compile):
        self._plan = program.plan
        self._functions = program.functions
        self._compile = compile
        self._avals = program.plan.avals()
        self._specs = _specs_at_start(program.plan)
        self._variants: dict[tuple[int, Run], Variant] = {}
        self._chosen: dict[Variant, tuple[Spec, ...]] = {}
        self._asked: set[tuple[int, Variant]] = set()
        self._compiling: dict[Future[tuple[Spec, ...]], Variant] = {}
        # Instructions to look at, those that wait for the spec of a value, and those that wait for a variant.
        self._ready = collections.deque(
            (group.mpmd_idx, instruction)
            for group in program.plan.programs
            for instruction in group.instructions
            if isinstance(instruction, Run | Recv)
        )
        self._for_value: dict[tuple[int, Name], list[tuple[int, Run | Recv]]] = collections.defaultdict(list)
        self._for_variant: dict[Variant, list[tuple[int, Run]]] = collections.defaultdict(list)

    def run(self) -> ChosenSpecs:
        while self._ready or self._compiling:
            while self._ready:
                mpmd_idx, instruction = self._ready.popleft()
                if isinstance(instruction, Run):
                    self._try_run(mpmd_idx, instruction)
                else:
                    self._receive(mpmd_idx, instruction)
            done, _ = concurrent.futures.wait(self._compiling, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                variant = self._compiling.pop(future)
                self._chosen.setdefault(variant, future.result())
                self._ready.extend(self._for_variant.pop(variant, ()))
        assert not self._for_value, "the programs wait for one another: verify should have refused them"
        return ChosenSpecs(self._variants, self._chosen, self._specs)

    def _try_run(self, mpmd_idx: int, run: Run) -> None:
        executable = self._plan.executable(run.executable)
        in_specs: list[Spec] = []
        for name, spec in zip(run.inputs, executable.in_specs, strict=True):
            known = self._specs.get((mpmd_idx, name)) if spec is None else spec
            if known is None:
                self._for_value[mpmd_idx, name].append((mpmd_idx, run))
                return
            in_specs.append(known)
        variant = self._variants[mpmd_idx, run] = (run.executable, tuple(in_specs))
        executable = dataclasses.replace(executable, in_specs=variant[1])
        if None not in executable.out_specs:
            self._chosen[variant] = executable.out_specs  # type: ignore[assignment]
        if variant in self._chosen:
            self._ask(mpmd_idx, dataclasses.replace(executable, out_specs=self._chosen[variant]), variant)
            for name, spec in zip(run.outputs, self._chosen[variant], strict=True):
                self._know(mpmd_idx, name, spec)
            return
        if variant not in self._for_variant:
            self._ask(mpmd_idx, executable, variant)
        self._for_variant[variant].append((mpmd_idx, run))

    def _ask(self, mpmd_idx: int, executable: Executable, variant: Variant) -> None:
        if (mpmd_idx, variant) not in self._asked:
            self._asked.add((mpmd_idx, variant))
            future = self._compile(mpmd_idx, executable, self._functions[executable.name])
            self._compiling[future] = variant

    def _receive(self, mpmd_idx: int, recv: Recv) -> None:
        for name in recv.values:
            spec = self._specs.get((recv.src, name))
            if spec is None:
                self._for_value[recv.src, name].append((mpmd_idx, dataclasses.replace(recv, values=(name,))))
            else:
                sizes = self._plan.submesh(mpmd_idx)
                self._know(mpmd_idx, name, fitting(spec, self._avals[name].shape, sizes))

    def _know(self, mpmd_idx: int, name: Name, spec: Spec) -> None:
        self._specs[mpmd_idx, name] = spec
        self._ready.extend(self._for_value.pop((mpmd_idx, name), ()))
