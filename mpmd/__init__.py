"""Pipeline-parallel JAX: one ordinary train step, cut into stages that groups of devices run."""

from mpmd import render
from mpmd.annotate import mark_pipeline_boundary, mark_stage_end, pipeline_enter_stage
from mpmd.array import MpmdArray
from mpmd.errors import CompileError, GroupDiedError, PerformanceWarning, PlanError, StepAborted, TaskError
from mpmd.explain import explain
from mpmd.mesh import MpmdMesh
from mpmd.reduce import Add, Concat, Max, Op, treduce, treduce_i
from mpmd.schedules import Eager1F1B, GPipe, Interleaved1F1B, Schedule, Std1F1B
from mpmd.step import mpmd_jit_with_loop

__all__ = [
    "Add",
    "CompileError",
    "Concat",
    "Eager1F1B",
    "GPipe",
    "GroupDiedError",
    "Interleaved1F1B",
    "Max",
    "MpmdArray",
    "MpmdMesh",
    "Op",
    "PerformanceWarning",
    "PlanError",
    "Schedule",
    "Std1F1B",
    "StepAborted",
    "TaskError",
    "explain",
    "mark_pipeline_boundary",
    "mark_stage_end",
    "mpmd_jit_with_loop",
    "pipeline_enter_stage",
    "render",
    "treduce",
    "treduce_i",
]
