"""Candidates, the ways to run a step, and predictions of their costs."""

from __future__ import annotations

import dataclasses

from mpmd.language.remat import Remat
from mpmd.planner.expected_errors import EXPECTED_ERRORS
from mpmd.planner.pools import AnyCluster
from mpmd.planner.submesh import Submesh
from mpmd.schedules import Schedule, Seq1F1B


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run a step: the planner's decisions for its loop, or for the first of several loops.

    Attributes:
      layers_per_stage: the number of layers of each stage, in order; empty while layers are not cut yet.
      submeshes: of each group; other mappings of axes to numbers of devices become ``Submesh``es.
      schedule: its stages are ``layers_per_stage``. It has all groups, or in a step with several loops all or
        the first.
      num_microbatches: of a step.
      remat: the policy of each stage, or one policy for all stages, by which its layers are computed again in
        the backward; ``True`` becomes full rematerialisation, and ``False`` none.
      fsdp: whether weights and the optimizer's state for them are divided over ``data``, too.
      gather_once: whether weights are gathered once per step, and gradients summed once, instead of in every
        task: ``mpmd.jit(..., gather="step", partial_sums="all")``. It takes memory for whole weights and
        gradients.
      sequence_parallel: whether values between tensor-parallel regions, such as norms and residuals, are
        divided over ``model``, too, along their sequence or, without one, their rows.
      later: the candidates of the later loops, with the same submeshes, ``fsdp``, ``gather_once`` and
        ``sequence_parallel``.
    """

    layers_per_stage: tuple[int, ...]
    submeshes: tuple[Submesh, ...]
    schedule: Schedule
    num_microbatches: int
    remat: tuple[Remat, ...]
    fsdp: bool
    gather_once: bool = False
    sequence_parallel: bool = False
    later: tuple[Candidate, ...] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(submesh, Submesh) for submesh in self.submeshes):
            object.__setattr__(self, "submeshes", tuple(map(Submesh.of, self.submeshes)))
        if not isinstance(self.remat, tuple):
            object.__setattr__(self, "remat", (Remat.of(self.remat),))
        elif len(self.remat) > 1 and len({*self.remat}) == 1:
            object.__setattr__(self, "remat", self.remat[:1])

    def remat_of(self, stage: int) -> Remat:
        """The policy of a stage."""
        return self.remat[stage % len(self.remat)]

    @property
    def is_rematerialised(self) -> bool:
        """Whether any stage computes anything again."""
        return self.remat != (Remat.NONE,)

    @property
    def settings(self) -> tuple[int, tuple[Remat, ...], bool, bool, bool]:
        """The settings on which the costs of its layers depend, beside the submesh of their group."""
        return self.num_passes, self.remat, self.fsdp, self.gather_once, self.sequence_parallel

    @property
    def num_passes(self) -> int:
        """The passes of a step through the stages: the slices of all microbatches."""
        return self.num_microbatches * self.schedule.slices

    @property
    def shared(self) -> tuple[tuple[Submesh, ...], bool, bool, bool]:
        """The decisions that all loops of a step share."""
        return self.submeshes, self.fsdp, self.gather_once, self.sequence_parallel

    @property
    def loops(self) -> tuple[Candidate, ...]:
        """The candidate of each loop of the step, in order."""
        return (self, *self.later)

    @property
    def stages_per_group(self) -> int:
        """The stages of the group that has fewest, at least 1."""
        return max(1, self.schedule.num_stages // self.schedule.mpmd_dim)

    @property
    def schedule_text(self) -> str:
        """The name of its schedule, with the options of slices, such as ``eager Seq1F1B of 4 slices``."""
        schedule = self.schedule
        if schedule.slices == 1:
            return schedule.name
        name = f"{schedule.name} of {schedule.slices} slices"
        if not isinstance(schedule, Seq1F1B):
            return name
        return f"{'eager ' * schedule.eager}{name}{' with split backwards' * schedule.split_backward}"


@dataclasses.dataclass(frozen=True)
class Memory:
    """The peak memory of the group that needs most, by its parts, in bytes on each device of the group.

    Where groups have devices of several kinds, it is the group that lacks most, or has least left.
    """

    group: int
    weights: float
    gradients: float
    state: float
    residuals: float
    messages: float
    temporaries: float

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of each part, by its name."""
        return {name: nbytes for name, nbytes in vars(self).items() if name != "group"}

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state + self.residuals + self.messages + self.temporaries


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted cost of a candidate.

    Attributes:
      seconds: the time of a step.
      bubble: the share of the groups' time in which they wait.
      communication: the share of the step's time that goes into all-reduces and gathered weights, in the
        group that works longest.
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

    @property
    def expected_error(self) -> float:
        """Expected relative error of ``seconds`` by their source, e.g. 0.07 for a formula."""
        return EXPECTED_ERRORS[self.source]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: a candidate with its prediction, and, unless it has won, why it lost."""

    candidate: Candidate
    prediction: Prediction
    label: str = ""
    reason: str = ""

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.prediction.seconds

    def capacity(self, cluster: AnyCluster) -> float:
        """The bytes of a device of the group that needs most."""
        return cluster.pool(self.candidate.submeshes[self.prediction.memory.group].pool).memory

    def missing_bytes(self, cluster: AnyCluster) -> float:
        """The bytes that a device lacks in the group that needs most; at most 0 for a candidate that fits."""
        return self.prediction.memory.total - self.capacity(cluster)
