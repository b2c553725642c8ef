from . import checkpoint, render, replay, simulate
from .arrays.array import MpmdArray, to_host
from .checking import check
from .checkpoint import restore, save, save_async
from .compiler.find_layers.auto_marks import auto_marks
from .errors import (
    CheckpointError,
    CompileError,
    DamagedCheckpointError,
    GroupDiedError,
    PerformanceWarning,
    PlanError,
    SharedWeightsWarning,
    StateLostError,
    StepAborted,
    StepWarning,
    TaskError,
)
from .language.annotate import mark_pipeline_boundary, mark_stage_end, pipeline_enter_stage
from .language.gradients import grad, value_and_grad
from .language.kernels import cost
from .language.operations import Op
from .language.per_group import per_group
from .language.pieces import microbatches, stage_ends
from .language.reduce import Add, Concat, Max, Mean, treduce, treduce_i
from .language.remat import Remat
from .language.slices import slice_bounds, slices
from .meshes.abstract_mesh import AbstractMpmdMesh
from .meshes.mesh import MpmdMesh
from .on_ray import ClusterMesh, Recovery, launch
from .planner.choice import Choice
from .planner.choose import plan
from .planner.cluster import Cluster, HeterogeneousCluster
from .profile.profile import Profile
from .runtime.device_trace import collective_seconds
from .schedules import (
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
    Seq1F1B,
    Std1F1B,
    TaskTimes,
    VHalf,
    VMin,
    ZeroBubble,
    ZeroBubbleH2,
    ZeroBubbleV,
)
from .step.jit import jit, mpmd_jit_with_loop
from .step.planned_step import explain
from .step.reshard import reshard
from .version import __version__
from .watching.metrics import metrics

__all__ = [
    "AbstractMpmdMesh",
    "Add",
    "CheckpointError",
    "Choice",
    "Cluster",
    "ClusterMesh",
    "CompileError",
    "Concat",
    "CustomSchedule",
    "DamagedCheckpointError",
    "DualPipeV",
    "Eager1F1B",
    "ForwardOnly",
    "GPipe",
    "GroupDiedError",
    "HeterogeneousCluster",
    "Interleaved1F1B",
    "InterleavedGPipe",
    "InterleavedZeroBubble",
    "KimiK2",
    "ListSchedule",
    "LoopedBFS",
    "Max",
    "Mean",
    "MpmdArray",
    "MpmdMesh",
    "Op",
    "PerformanceWarning",
    "PlanError",
    "Profile",
    "Recovery",
    "Remat",
    "Schedule",
    "Seq1F1B",
    "SharedWeightsWarning",
    "StateLostError",
    "Std1F1B",
    "StepAborted",
    "StepWarning",
    "TaskError",
    "TaskTimes",
    "VHalf",
    "VMin",
    "ZeroBubble",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "__version__",
    "auto_marks",
    "check",
    "checkpoint",
    "collective_seconds",
    "cost",
    "explain",
    "grad",
    "jit",
    "launch",
    "mark_pipeline_boundary",
    "mark_stage_end",
    "metrics",
    "microbatches",
    "mpmd_jit_with_loop",
    "per_group",
    "pipeline_enter_stage",
    "plan",
    "render",
    "replay",
    "reshard",
    "restore",
    "save",
    "save_async",
    "simulate",
    "slice_bounds",
    "slices",
    "stage_ends",
    "to_host",
    "treduce",
    "treduce_i",
    "value_and_grad",
]
