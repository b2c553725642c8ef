"""The exceptions and warnings users see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MESH_CLOSED = "the mesh was closed"
"""So begin all messages of which a closed mesh is the reason."""


class CompileError(ValueError):
    """The step cannot be compiled; the message lists every fault with its line and the remedy."""

    def __init__(self, faults: Sequence[str] | str):
        self.faults = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))


class StepWarning(UserWarning):
    """A step computes the numbers of ``jax.jit``, but probably not as its user intended.

    Given once, when a step is compiled; the message has the remedy. Each kind is a category of its own,
    which ``warnings.filterwarnings`` can make an error or silence.
    """


class PerformanceWarning(StepWarning):
    """The step computes the right numbers, but not as a pipeline should; the message says how to mend it."""


class SharedWeightsWarning(StepWarning):
    """A mark in a scan over time or over rows makes each of its iterations a stage, with the same weights."""


class UnreadMicrobatchWarning(StepWarning):
    """A loop's function does not read its microbatch, so each microbatch computes the same."""


class SharedKeyWarning(StepWarning):
    """A loop draws the same random numbers in every microbatch."""


class IdleGroupWarning(StepWarning):
    """A group of the mesh has no stage of the step."""


class UndonatedStateWarning(StepWarning):
    """Memory is short, and a step returns new state without donation of the old one."""


class PlanError(AssertionError):
    """A plan breaks one of its invariants; a fault of the compiler, or of a hand-written plan."""


class _GroupError(RuntimeError):
    """An error of group ``mpmd_idx``. All arguments of the constructor are in ``args``, for ``pickle``."""

    mpmd_idx: Any

    def __init__(self, message: str, mpmd_idx: Any, *details: Any):
        super().__init__(message, mpmd_idx, *details)
        self.mpmd_idx = mpmd_idx

    def __str__(self) -> str:
        return self.args[0]


class TaskError(_GroupError):
    """A task failed on a group. Names the task's kind, stage and microbatch, and the group."""

    mpmd_idx: int

    def __init__(self, message: str, mpmd_idx: int, label: str):
        super().__init__(message, mpmd_idx, label)
        self.label = label


class NonFiniteError(TaskError, FloatingPointError):
    """A task made a NaN or an infinity under ``jax.debug_nans`` or ``jax.debug_infs``. Names the value."""


class CallbackError(RuntimeError):
    """A function that a step calls back has raised; the message has its line, ``__cause__`` the exception."""


class GroupDiedError(_GroupError):
    """The process that hosts a group is gone, and the values in its memory are lost."""

    mpmd_idx: int


class StepTimeoutError(TimeoutError):
    """A step took longer than the user allows, and was ended; the message has each process's activity."""


class GroupStuckError(GroupDiedError, TimeoutError):
    """A process was in a step for longer than the user allows, and did not leave it: its group was ended."""


class RecoveryError(GroupDiedError):
    """A group has died, and the run cannot go on by itself; the message has the reason and the remedy."""


class SilentCorruptionError(RuntimeError):
    """Values have wrong bits without a reported error: a device, a memory or a connection has a fault.

    The message names the device, group or connection where these can be told.

    Attributes:
      mpmd_idxs: the groups that may have the fault.
    """

    def __init__(self, message: str, mpmd_idxs: Sequence[int]):
        super().__init__(message, mpmd_idxs)
        self.mpmd_idxs = tuple(mpmd_idxs)

    def __str__(self) -> str:
        return self.args[0]


class StateLostError(GroupDiedError):
    """Groups have died together with the holders of their copies, so that all groups' values are lost.

    The mesh goes on, and so do steps that were compiled for it: restore the state from a checkpoint, which
    the message names if it is known, or initialize it again.

    Attributes:
      checkpoint: the path of the last checkpoint that ``mpmd.save`` has completed on the mesh, or from which
        its groups have read; ``None`` when there is none.
    """

    def __init__(self, message: str, mpmd_idx: int, checkpoint: str | None = None):
        super().__init__(message, mpmd_idx, checkpoint)
        self.checkpoint = checkpoint


class StepAborted(RuntimeError):
    """A group stopped waiting because another group failed; ``__cause__`` or the message says why."""


class CheckpointError(_GroupError):
    """A checkpoint could not be written or read; the message has the path and the reason.

    Attributes:
      mpmd_idx: the group that could not; ``None`` when it was the driver.
    """

    mpmd_idx: int | None


class DamagedCheckpointError(CheckpointError):
    """A checkpoint was changed on storage; the message names the files or arrays.

    Attributes:
      last_whole: the path of the last checkpoint beside it that has all its files; ``None`` without one.
    """

    def __init__(self, message: str, mpmd_idx: int | None, last_whole: str | None):
        super().__init__(message, mpmd_idx, last_whole)
        self.last_whole = last_whole
