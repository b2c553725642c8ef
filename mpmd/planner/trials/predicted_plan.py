"""Predicts the shardings and temporary buffers that the groups' compilers would add to a plan.

A step that is only planned has neither. With both predicted, the simulator and the report read the plan just
as that of a step that the groups have loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax.extend.core import Jaxpr

from mpmd.compiler.jaxprs.sharded_dimensions import ShardedDimensions, as_spec, dimensions_of, follow, sharded
from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.ir.plan import Aval, Executable, Name, Plan, Recv, Run, Spec
from mpmd.ir.specs import fitting, num_shards
from mpmd.planner.trials.device_work import device_work
from mpmd.planner.trials.work_on_device import DeviceWork
from mpmd.program import Program


class PredictedPlan(NamedTuple):
    """A plan without open specs and with temporaries, and the work of each executable on a device."""

    plan: Plan
    work: Mapping[str, DeviceWork]


def predicted_plan(program: Program) -> PredictedPlan:
    """The plan of a program with predicted shardings and temporaries."""
    return _Predictor(program).run()


class _Predictor:
    """The predictions so far: the spec of each value on each group, and the executables with theirs."""

    def __init__(self, program: Program):
        self._plan = plan = program.plan
        self._jaxprs = program.jaxprs
        self._specs: dict[tuple[int, Name], Spec] = {}
        for leaf in plan.inputs:
            if leaf.name:
                self._specs |= dict.fromkeys(((group, leaf.name) for group in leaf.mpmd_idxs), leaf.spec)
        for constant in plan.constants:
            self._specs |= dict.fromkeys(((group, constant.name) for group in constant.mpmd_idxs), ())
        self._executables: dict[str, Executable] = {}
        self._work: dict[str, DeviceWork] = {}

    def run(self) -> PredictedPlan:
        """Follows values from producer to reader, across groups, as the groups would run."""
        plan = self._plan
        positions = [0] * len(plan.programs)
        while any(self._advance(group, positions) for group in range(len(positions))):
            pass
        ended = [len(program.instructions) for program in plan.programs]
        assert positions == ended, "the groups of a verified plan do not deadlock"
        executables = tuple(self._executables.get(e.name, e) for e in plan.executables)
        return PredictedPlan(dataclasses.replace(plan, executables=executables), self._work)

    def _advance(self, group: int, positions: list[int]) -> bool:
        """Follows a group's program as far as its messages are known; returns whether it has advanced."""
        instructions = self._plan.programs[group].instructions
        start = positions[group]
        while positions[group] < len(instructions):
            instruction = instructions[positions[group]]
            if isinstance(instruction, Recv):
                if any((instruction.src, name) not in self._specs for name in instruction.values):
                    break
                for name in instruction.values:
                    self._specs[group, name] = self._arriving(group, name, instruction.src)
            elif isinstance(instruction, Run):
                self._run(group, instruction)
            positions[group] += 1
        return positions[group] > start

    def _arriving(self, group: int, name: Name, src: int) -> Spec:
        """The spec of a received value: that of its producer, or replicated where that does not fit."""
        shape = self._plan.avals()[name].shape
        return fitting(self._specs[src, name], shape, self._plan.submesh(group))

    def _run(self, group: int, run: Run) -> None:
        if run.executable not in self._executables:
            inputs = [self._specs[group, name] for name in run.inputs]
            self._predict(self._plan.executable(run.executable), group, run, inputs)
        executable = self._executables[run.executable]
        for name, spec in zip(run.outputs, executable.out_specs, strict=True):
            assert spec is not None, "it has been predicted"
            self._specs[group, name] = spec

    def _predict(self, executable: Executable, group: int, run: Run, inputs: list[Spec]) -> None:
        mesh = self._plan.submesh(group)
        jaxpr = self._jaxprs[group, run.task]
        in_specs = tuple(
            followed if known is None else known
            for known, followed in zip(executable.in_specs, inputs, strict=True)
        )
        operands = [
            _fitting(spec, aval, mesh) for spec, aval in zip(in_specs, executable.inputs, strict=True)
        ]
        fixed_results = [
            None if spec is None else _fitting(spec, aval, mesh)
            for spec, aval in zip(executable.out_specs, executable.outputs, strict=True)
        ]
        work = device_work(jaxpr, operands, mesh, fixed_results)
        results = _results(jaxpr, operands, mesh)
        out_specs = tuple(
            fitting(as_spec(followed), aval.shape, mesh) if known is None else known
            for known, followed, aval in zip(executable.out_specs, results, executable.outputs, strict=True)
        )
        self._work[executable.name] = work
        self._executables[executable.name] = dataclasses.replace(
            executable,
            in_specs=in_specs,
            out_specs=out_specs,
            memory=ExecutableMemory(
                inputs=sum(map(_bytes, executable.inputs, in_specs, [mesh] * len(in_specs))),
                outputs=sum(map(_bytes, executable.outputs, out_specs, [mesh] * len(out_specs))),
                aliased=sum(_bytes(executable.inputs[i], in_specs[i], mesh) for i in executable.donated),
                temporaries=round(work.temporaries),
                code=0,
            ),
        )


def _fitting(spec: Spec, aval: Aval, mesh: Mapping[str, int]) -> ShardedDimensions:
    return dimensions_of(fitting(spec, aval.shape, mesh), len(aval.shape))


def _results(
    jaxpr: Jaxpr, operands: list[ShardedDimensions], mesh: Mapping[str, int]
) -> list[ShardedDimensions]:
    known = follow(jaxpr.eqns, dict(zip(jaxpr.invars, operands, strict=True)), mesh)
    return [sharded(atom, known) for atom in jaxpr.outvars]


def _bytes(aval: Aval, spec: Spec, mesh: Mapping[str, int]) -> int:
    return aval.nbytes // num_shards(spec, mesh)
