"""What a plan may choose for a step, and what is predicted of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpmd.planner.profile import Kind
from mpmd.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run a step: its loop, or the first one of several.

    Attributes:
      layers_per_stage: the layers of each stage, in order.
      submeshes: for each group the devices along each axis, named as the kind of division.
      schedule: with as many stages, and with as many groups, or, of several loops, with as many or fewer; the
        groups of the stages are its own.
      num_microbatches: of a step.
      remat: whether each layer is computed again in the backward, from what enters it.
      fsdp: whether weights and what the optimizer keeps for them are divided over ``data``, too.
      gather_once: whether these are gathered once per step, and gradients summed once, instead of in every
        task: ``mpmd.jit(..., gather="step", partial_sums="all")``. It takes memory for whole weights and
        gradients.
      later: those of the loops behind the first, with the same submeshes, ``fsdp`` and ``gather_once``.
    """

    layers_per_stage: tuple[int, ...]
    submeshes: tuple[Mapping[Kind, int], ...]
    schedule: Schedule
    num_microbatches: int
    remat: bool
    fsdp: bool
    gather_once: bool = False
    later: tuple[Candidate, ...] = ()

    @property
    def loops(self) -> tuple[Candidate, ...]:
        """That of each loop of the step, in order."""
        return (self, *self.later)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The peak of the group that needs most, in bytes on each of its devices, and its parts."""

    group: int
    weights: float
    gradients: float
    state: float
    residuals: float
    messages: float
    temporaries: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state + self.residuals + self.messages + self.temporaries


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a candidate costs.

    Attributes:
      seconds: of a step.
      bubble: the share of the groups' time in which they wait.
      communication: the share of the step's time, of the group that works longest, that goes into sums over
        devices and gathered weights.
      memory: at the worst moment.
      stage_seconds: forward and backward of each stage, for one microbatch.
      source: ``"formula"``, ``"simulation"`` of the actual plan, or ``"measurement"`` of its tasks.
    """

    seconds: float
    bubble: float
    communication: float
    memory: Memory
    stage_seconds: tuple[float, ...]
    source: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: a candidate, what is predicted of it, and, unless it has won, why it lost."""

    candidate: Candidate
    prediction: Prediction
    label: str
    reason: str = ""
