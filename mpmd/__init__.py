"""Pipeline-parallel JAX: one ordinary train step, cut into stages that groups of devices run."""

from mpmd import render, simulate
from mpmd.annotate import mark_pipeline_boundary, mark_stage_end, pipeline_enter_stage
from mpmd.array import MpmdArray
from mpmd.errors import CompileError, GroupDiedError, PerformanceWarning, PlanError, StepAborted, TaskError
from mpmd.explain import explain
from mpmd.mesh import MpmdMesh
from mpmd.reduce import Add, Concat, Max, Op, treduce, treduce_i
from mpmd.schedules import (
    CustomSchedule,
    DualPipeV,
    Eager1F1B,
    ForwardOnly,
    GPipe,
    Interleaved1F1B,
    InterleavedGPipe,
    InterleavedZeroBubble,
    KimiK2,
    ListSchedule,
    LoopedBFS,
    Schedule,
    Std1F1B,
    TaskTimes,
    VHalf,
    VMin,
    ZeroBubble,
    ZeroBubbleH2,
    ZeroBubbleV,
)
from mpmd.step import mpmd_jit_with_loop

__all__ = [
    "Add",
    "CompileError",
    "Concat",
    "CustomSchedule",
    "DualPipeV",
    "Eager1F1B",
    "ForwardOnly",
    "GPipe",
    "GroupDiedError",
    "Interleaved1F1B",
    "InterleavedGPipe",
    "InterleavedZeroBubble",
    "KimiK2",
    "ListSchedule",
    "LoopedBFS",
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
    "TaskTimes",
    "VHalf",
    "VMin",
    "ZeroBubble",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "explain",
    "mark_pipeline_boundary",
    "mark_stage_end",
    "mpmd_jit_with_loop",
    "pipeline_enter_stage",
    "render",
    "simulate",
    "treduce",
    "treduce_i",
]
