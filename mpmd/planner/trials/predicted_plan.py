"""Predicts the shardings and temporary buffers that the groups' compilers would add to a plan.

A step that is only planned has neither. With both predicted, the simulator and the report read its plan
like the plan of a step that the groups have loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

from jax.extend.core import Jaxpr, Var

from mpmd.compiler.jaxprs.sharded_dimensions import ShardedDimensions, as_spec
from mpmd.ir.executable_memory import ExecutableMemory
from mpmd.ir.plan import Aval, Executable, Plan, Spec
from mpmd.ir.specs import dimensions_of, fitting, num_shards
from mpmd.planner.trials.device_work import device_work
from mpmd.planner.trials.kernel_residuals import NO_POSITIONS, Positions, kernel_residuals, without_residuals
from mpmd.planner.trials.work_on_device import DeviceWork
from mpmd.program import Function, Program, Variant
from mpmd.runtime.resolve_specs import compile_all


class PredictedPlan(NamedTuple):
    """A plan without open specs and with temporaries, and the work of each executable on a device."""

    plan: Plan
    work: Mapping[str, DeviceWork]


def predicted_plan(program: Program, flash_attention: bool = False) -> PredictedPlan:
    """The plan of a program with predicted shardings and temporaries.

    Values are followed across groups as when groups compile, with a compiler that answers at once.

    Args:
      flash_attention: whether ``jax.nn.dot_product_attention`` is a kernel.
    """
    predictions = _Predictions(program, flash_attention)
    resolved = compile_all(program, predictions.compile)
    variants = resolved.compiled
    executables = tuple(
        dataclasses.replace(
            without_residuals(executable, predictions.residuals(variants[executable.name])),
            memory=predictions.memory[variants[executable.name]],
        )
        for executable in resolved.plan.executables
    )
    plan = dataclasses.replace(resolved.plan, executables=executables)
    return PredictedPlan(plan, {e.name: predictions.work[variants[e.name]] for e in executables})


class _Predictions:
    """The predicted memory and work of each variant of an executable that was asked for."""

    def __init__(self, program: Program, flash_attention: bool):
        self._plan, self._flash_attention = program.plan, flash_attention
        self._jaxprs = {
            run.executable: program.jaxprs[group.mpmd_idx, run.task]
            for group in program.plan.programs
            for run in group.runs
        }
        self._residuals = kernel_residuals(program.plan, self._jaxprs, flash_attention)
        self._out_specs: dict[Variant, tuple[Spec, ...]] = {}
        self.memory: dict[Variant, ExecutableMemory] = {}
        self.work: dict[Variant, DeviceWork] = {}

    def residuals(self, variant: Variant) -> Positions:
        return self._residuals.get(variant[0], NO_POSITIONS)

    def compile(self, mpmd_idx: int, executable: Executable, function: Function) -> Future[tuple[Spec, ...]]:
        """The output specs of an executable with known input specs."""
        in_specs = tuple(spec for spec in executable.in_specs if spec is not None)
        assert len(in_specs) == len(executable.in_specs), (
            "an executable is compiled when its inputs are known"
        )
        variant: Variant = executable.name, in_specs
        if variant not in self._out_specs:
            self._predict(variant, executable, self._plan.submesh(mpmd_idx))
        answer: Future[tuple[Spec, ...]] = Future()
        answer.set_result(self._out_specs[variant])
        return answer

    def _predict(self, variant: Variant, executable: Executable, mesh: Mapping[str, int]) -> None:
        jaxpr, in_specs = self._jaxprs[executable.name], variant[1]
        operands = [
            _fitting(spec, aval, mesh) for spec, aval in zip(in_specs, executable.inputs, strict=True)
        ]
        fixed_results = [
            None if spec is None else _fitting(spec, aval, mesh)
            for spec, aval in zip(executable.out_specs, executable.outputs, strict=True)
        ]
        residuals = self.residuals(variant)
        work, results = device_work(
            jaxpr,
            operands,
            mesh,
            fixed_results,
            flash_attention=self._flash_attention,
            residuals=_variables(jaxpr, residuals),
        )
        executable = without_residuals(executable, residuals)
        out_specs = tuple(
            fitting(as_spec(followed), aval.shape, mesh) if known is None else known
            for known, followed, aval in zip(executable.out_specs, results, executable.outputs, strict=True)
        )
        self._out_specs[variant], self.work[variant] = out_specs, work
        self.memory[variant] = ExecutableMemory(
            inputs=sum(map(_bytes, executable.inputs, in_specs, [mesh] * len(in_specs))),
            outputs=sum(map(_bytes, executable.outputs, out_specs, [mesh] * len(out_specs))),
            aliased=sum(_bytes(executable.inputs[i], in_specs[i], mesh) for i in executable.donated),
            temporaries=round(work.temporaries),
            code=0,
        )


def _variables(jaxpr: Jaxpr, positions: Positions) -> set[Var]:
    at_positions = [jaxpr.invars[i] for i in positions.inputs] + [jaxpr.outvars[i] for i in positions.outputs]
    return {atom for atom in at_positions if isinstance(atom, Var)}


def _fitting(spec: Spec, aval: Aval, mesh: Mapping[str, int]) -> ShardedDimensions:
    return dimensions_of(fitting(spec, aval.shape, mesh), len(aval.shape))


def _bytes(aval: Aval, spec: Spec, mesh: Mapping[str, int]) -> int:
    return aval.nbytes // num_shards(spec, mesh)
