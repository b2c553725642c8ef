"""The base class of schedules, and the ways to place stages on groups."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from mpmd.ir.plan import Cell
from mpmd.ir.slices import SliceNumbers
from mpmd.validation import int_fault, int_faults, raise_faults, sequence_fault, size_fault, type_fault

TaskLists = Sequence[Sequence[Cell]]
"""The cells that each group runs, first to last."""

Placement = tuple[int, ...]
"""The group of each stage."""


@dataclasses.dataclass(frozen=True)
class Schedule(abc.ABC):
    """The order in which ``mpmd_dim`` groups run the tasks of ``num_stages`` stages.

    A new schedule defines only ``tasks``::

        @dataclasses.dataclass(frozen=True)
        class OneAtATime(Schedule):
            def tasks(self, num_microbatches):
                pairs = list(itertools.product(range(num_microbatches), ("fwd", "bwd")))
                return [
                    [Task(kind, stage, microbatch) for microbatch, kind in pairs]
                    for stage in range(self.num_stages)
                ]

        OneAtATime(num_stages=4, mpmd_dim=4)

    ``check_schedule`` reports the faults of such lists, and ``mpmd.render.schedule_grid`` draws them.

    A slice of a microbatch is a further pass through the stages. In the tasks of a schedule with ``slices``,
    stage ``s`` on slice ``k`` is numbered ``k * num_stages + s``; see ``mpmd.ir.slices``.

    Raises ``TypeError`` or ``ValueError`` unless the numbers of stages and groups are ints of at least 1.
    """

    num_stages: int
    mpmd_dim: int

    slices = 1
    """The number of slices that each microbatch is cut into, along its sequence."""

    def __post_init__(self) -> None:
        raise_faults(
            size_fault(f"{self.name}'s num_stages", self.num_stages),
            size_fault(f"{self.name}'s mpmd_dim", self.mpmd_dim),
            size_fault(f"{self.name}'s slices", self.slices),
        )

    def __repr__(self) -> str:
        shown = [field.name for field in dataclasses.fields(self) if field.repr]
        values = (f"{name}={getattr(self, name)!r}" for name in shown if name != "slices" or self.slices > 1)
        return f"{self.name}({', '.join(values)})"

    @classmethod
    def of_size(cls, num_stages: int, mpmd_dim: int) -> Self:
        """The schedule of this size with the class's defaults. Raises ``ValueError`` as the class does."""
        return cls(num_stages, mpmd_dim)

    @abc.abstractmethod
    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        """The tasks of each group, first to last. All tasks of a stage are on one group.

        Raises ``ValueError`` without microbatches.
        """

    @property
    def name(self) -> str:
        """The name of the schedule in messages and pictures."""
        return type(self).__name__

    @property
    def numbers(self) -> SliceNumbers:
        """The numbers that stages have in tasks, on all slices."""
        return SliceNumbers(self.num_stages, self.slices)


@dataclasses.dataclass(frozen=True)
class OneStagePerGroup(Schedule):
    """A schedule in which group ``i`` runs stage ``i``, so that ``mpmd_dim`` equals ``num_stages``."""

    mpmd_dim: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        raise_faults(
            size_fault(f"{self.name}'s num_stages", self.num_stages),
            size_fault(f"{self.name}'s slices", self.slices),
        )
        object.__setattr__(self, "mpmd_dim", self.num_stages)

    @classmethod
    def of_size(cls, num_stages: int, mpmd_dim: int) -> Self:
        if num_stages != mpmd_dim:
            raise ValueError(
                f"{cls.__name__} places one stage on each group: mpmd_dim={mpmd_dim} takes "
                f"num_stages={mpmd_dim}, got num_stages={num_stages}"
            )
        return cls(num_stages)


@dataclasses.dataclass(frozen=True)
class RoundRobin(Schedule):
    """A schedule in which group ``i`` of ``p`` runs the ``v`` stages ``i, i + p, i + 2 p, ...``.

    Raises ``ValueError`` when ``num_stages`` is not a multiple of ``mpmd_dim``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_stages % self.mpmd_dim:
            sizes = ", ".join(str(v * self.mpmd_dim) for v in (1, 2, 3))
            raise ValueError(
                f"{self.name} places equally many stages on each group: mpmd_dim={self.mpmd_dim} takes "
                f"num_stages={sizes}, ..., got num_stages={self.num_stages}"
            )

    @property
    def stages_per_group(self) -> int:
        """The number of stages on each group: ``v`` in the formulas."""
        return self.num_stages // self.mpmd_dim

    def stages_of(self, mpmd_idx: int) -> range:
        """The stages that a group runs, in the order in which forwards pass them."""
        raise_faults(int_fault("mpmd_idx", mpmd_idx, 0, most=self.mpmd_dim - 1))
        return range(mpmd_idx, self.num_stages, self.mpmd_dim)


@dataclasses.dataclass(frozen=True)
class VShaped(Schedule):
    """A schedule in which group ``i`` of ``p`` runs the stages ``i`` and ``2 p - 1 - i``.

    Forwards go down the groups and up again, like the letter V. The first group has the first stage and the
    last stage: a microbatch's backward starts where its forward started, and a weight that these two stages
    share is held once.

    Raises ``ValueError`` unless ``num_stages`` is twice ``mpmd_dim``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_stages != 2 * self.mpmd_dim:
            raise ValueError(
                f"{self.name} places two stages on each group: mpmd_dim={self.mpmd_dim} takes "
                f"num_stages={2 * self.mpmd_dim}, got num_stages={self.num_stages}"
            )

    def stages_of(self, mpmd_idx: int) -> tuple[int, int]:
        """The stages that a group runs: one on the way down, and one on the way up."""
        raise_faults(int_fault("mpmd_idx", mpmd_idx, 0, most=self.mpmd_dim - 1))
        return mpmd_idx, self.num_stages - 1 - mpmd_idx


@dataclasses.dataclass(frozen=True)
class AnyPlacement(Schedule):
    """A schedule for any placement of the stages.

    Attributes:
      placement: the group of each stage. The default is the placement of ``RoundRobin`` schedules; with as
        many stages as groups it is one stage per group. ``v_shape(mpmd_dim)`` is the placement
        of ``VShaped`` schedules.

    Raises ``ValueError`` unless every stage has a group and every group has a stage.
    """

    placement: Placement = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        name = f"{self.name}'s placement"
        raise_faults(sequence_fault(name, self.placement, "a sequence with the group of each stage"))
        placement = tuple(self.placement) or round_robin(self.num_stages, self.mpmd_dim)
        raise_faults(*int_faults(name, placement, 0))
        object.__setattr__(self, "placement", placement)
        if len(self.placement) != self.num_stages or {*self.placement} != {*range(self.mpmd_dim)}:
            raise ValueError(
                f"{self.name} needs a group for each stage and a stage for each group: "
                f"{self.num_stages} stages on {self.mpmd_dim} groups cannot be placed as placement="
                f"{self.placement}"
            )


def round_robin(num_stages: int, mpmd_dim: int) -> Placement:
    return tuple(stage % mpmd_dim for stage in range(num_stages))


def v_shape(mpmd_dim: int) -> Placement:
    return (*range(mpmd_dim), *reversed(range(mpmd_dim)))


def check_num_microbatches(num_microbatches: int) -> None:
    raise_faults(size_fault("num_microbatches", num_microbatches))


def schedule_fault(name: str, schedule: Any, *, optional: bool = False) -> TypeError | None:
    what = "a Schedule, such as mpmd.Std1F1B(num_stages=4)"
    return type_fault(name, schedule, Schedule, what, optional=optional)


def check_task_lists(name: str, tasks: Any) -> None:
    raise_faults(sequence_fault(name, tasks, "a sequence with the list of tasks of each group"))
    raise_faults(*(sequence_fault(f"{name}[{i}]", cells, "a list of tasks") for i, cells in enumerate(tasks)))
