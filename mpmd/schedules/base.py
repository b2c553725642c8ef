"""What every schedule is: a frozen value that lists the tasks of each group."""

from __future__ import annotations

import abc
import dataclasses

from mpmd.ir import Cell


@dataclasses.dataclass(frozen=True)
class Schedule(abc.ABC):
    """The order in which ``mpmd_dim`` groups run the tasks of ``num_stages`` stages.

    A new schedule gives ``tasks`` and nothing else::

        @dataclasses.dataclass(frozen=True)
        class OneAtATime(Schedule):
            def tasks(self, num_microbatches):
                pairs = list(itertools.product(range(num_microbatches), ("fwd", "bwd")))
                return [
                    [Task(kind, stage, microbatch) for microbatch, kind in pairs]
                    for stage in range(self.num_stages)
                ]

        OneAtATime(num_stages=4, mpmd_dim=4)

    ``check_schedule`` says what is wrong with such lists, ``mpmd.render.schedule_grid`` draws them.

    Raises ``ValueError`` when there is not at least one stage and one group.
    """

    num_stages: int
    mpmd_dim: int

    def __post_init__(self) -> None:
        for name in ("num_stages", "mpmd_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name} needs {name} to be at least 1, got {getattr(self, name)}")

    @abc.abstractmethod
    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        """What each group runs, first to last; all tasks of a stage are on one group.

        Raises ``ValueError`` when there are no microbatches.
        """

    @property
    def name(self) -> str:
        """What to call the schedule in messages and pictures."""
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class OneStagePerGroup(Schedule):
    """A schedule in which group ``i`` runs stage ``i``, so that ``mpmd_dim`` equals ``num_stages``."""

    mpmd_dim: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mpmd_dim", self.num_stages)
        super().__post_init__()


def check_num_microbatches(num_microbatches: int) -> None:
    """Raises ``ValueError`` unless there is at least one microbatch."""
    if num_microbatches < 1:
        raise ValueError(f"a schedule needs at least one microbatch, got num_microbatches={num_microbatches}")
