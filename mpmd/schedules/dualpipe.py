"""DualPipeV: forwards of one microbatch overlapped with backwards of another."""

from __future__ import annotations

import collections
import dataclasses

from mpmd.ir.plan import Cell, FusedTask, Task, TaskKind
from mpmd.schedules.base import VShaped, check_num_microbatches
from mpmd.schedules.v_shaped import ZeroBubbleV


@dataclasses.dataclass(frozen=True)
class DualPipeV(VShaped):
    """Runs a forward and a backward of different microbatches as one task, most of the time.

    Within such a task the compiler can overlap the communication of one (such as the all-to-all of a mixture
    of experts) with the computation of the other. Group ``i`` of ``p`` runs the stages ``i`` and
    ``2 p - 1 - i``. With ``m >= 2 p`` microbatches and equal tasks:

    - step: as long as ``6 m + 2 (p - 1)`` tasks, each member of a fused task counted as one; ``p - 1`` tasks
      are lost because a fused task sends nothing before its end;
    - memory: the residuals of ``2 p + 1`` stages' microbatches on every group, each half as large as with one
      stage per group.

    Fewer microbatches than ``2 p`` are too few to overlap, and run as in ``ZeroBubbleV``. Raises
    ``ValueError`` unless ``num_stages`` is twice ``mpmd_dim``.

    Source: DualPipeV of https://github.com/deepseek-ai/DualPipe, after "DeepSeek-V3 Technical Report", 2024,
    arXiv:2412.19437, section 3.2.1, and the V shape of arXiv:2401.10241, section 6.
    """

    def tasks(self, num_microbatches: int) -> list[list[Cell]]:
        check_num_microbatches(num_microbatches)
        if num_microbatches < 2 * self.mpmd_dim:
            return ZeroBubbleV(self.num_stages, self.mpmd_dim).tasks(num_microbatches)
        return [self._group_tasks(mpmd_idx, num_microbatches) for mpmd_idx in range(self.mpmd_dim)]

    def _group_tasks(self, mpmd_idx: int, num_microbatches: int) -> list[Cell]:
        """The tasks of a group, in the eight steps of the source."""
        group = _GroupTasks(*self.stages_of(mpmd_idx))
        groups_after = self.mpmd_dim - 1 - mpmd_idx
        for _ in range(2 * groups_after):  # 1
            group.run(group.fwd("down"))
        for _ in range(mpmd_idx + 1):  # 2
            group.run(group.fwd("down"))
            group.run(group.fwd("up"))
        for _ in range(groups_after):  # 3
            group.run_bwd_a("up")
            group.run_bwd_w()
            group.run(group.fwd("up"))
        for index in range(num_microbatches - 2 * self.mpmd_dim + mpmd_idx + 1):  # 4
            forward = group.fwd("down")
            if index == groups_after == 0:
                # The first backward of all needs no message, so that nothing is gained by waiting for it.
                group.run(forward)
                group.run(*group.bwd("up"))
            else:
                group.run(forward, *group.bwd("up"))
            group.run(group.fwd("up"), *group.bwd("down"))
        for _ in range(groups_after):  # 5
            group.run(*group.bwd("up"))
            group.run(group.fwd("up"), *group.bwd("down"))
        for index in range(2 * (mpmd_idx + 1)):  # 6
            leg = "down" if index % 2 else "up"
            if index <= mpmd_idx:
                group.run(*group.bwd(leg))
            else:
                group.run_bwd_a(leg)
        for _ in range(groups_after):  # 7
            group.run_bwd_w()
            group.run_bwd_a("down")
        while group.weights:  # 8
            group.run_bwd_w()
        return group.cells


class _GroupTasks:
    """Collects the tasks of a group; its stages are the legs of the V, with microbatches in order."""

    def __init__(self, down: int, up: int) -> None:
        self.cells: list[Cell] = []
        self.weights: collections.deque[Task] = collections.deque()
        self._stages = {"down": down, "up": up}
        self._counts: collections.Counter[tuple[TaskKind, str]] = collections.Counter()

    def run(self, *tasks: Task) -> None:
        self.cells.append(FusedTask(tasks) if len(tasks) > 1 else tasks[0])

    def run_bwd_a(self, leg: str) -> None:
        task, weights = self.bwd(leg)
        self.run(task)
        self.weights.append(weights)

    def run_bwd_w(self) -> None:
        self.run(self.weights.popleft())

    def fwd(self, leg: str) -> Task:
        return self._next("fwd", leg)

    def bwd(self, leg: str) -> tuple[Task, Task]:
        return self._next("bwdA", leg), self._next("bwdW", leg)

    def _next(self, kind: TaskKind, leg: str) -> Task:
        microbatch = self._counts[kind, leg]
        self._counts[kind, leg] += 1
        return Task(kind, self._stages[leg], microbatch)
