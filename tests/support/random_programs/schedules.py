"""The schedules of random programs: the families, and lists of tasks by chance."""

from __future__ import annotations

import dataclasses
import random

import mpmd
from mpmd.ir import FusedTask, Task


@dataclasses.dataclass(frozen=True)
class Shuffled(mpmd.Schedule):
    """Stages on groups and tasks in order by chance; some backwards in two, some tasks fused.

    ``ordered``: the tasks of each stage take the microbatches in ascending order.
    """

    chance: int
    ordered: bool = True

    def tasks(self, num_microbatches):
        chance = random.Random(repr((self, num_microbatches)))
        group_of = [stage % self.mpmd_dim for stage in range(self.num_stages)]
        chance.shuffle(group_of)
        halved = set()
        for stage in range(self.num_stages):
            share = chance.choice([0, 0.5, 1])
            halved |= {(stage, i) for i in range(num_microbatches) if chance.random() < share}
        needs = self._needs(num_microbatches, halved)
        lists = [[] for _ in range(self.mpmd_dim)]
        previous = None
        while needs:
            task = chance.choice([task for task, needed in needs.items() if needs.keys().isdisjoint(needed)])
            del needs[task]
            mine = lists[group_of[task.stage]]
            if previous is mine and chance.random() < 0.3:
                mine[-1] = FusedTask((*mine[-1].tasks, task))
            else:
                mine.append(task)
            previous = mine
        return lists

    def _needs(self, num_microbatches, halved):
        """All tasks, each with those that come before it."""

        def backward(half, stage, i):
            return Task(half if (stage, i) in halved else "bwd", stage, i)

        needs = {}
        for stage in range(self.num_stages):
            for i in range(num_microbatches):
                forward = Task("fwd", stage, i)
                inputs, weights = backward("bwdA", stage, i), backward("bwdW", stage, i)
                needs[forward] = {Task("fwd", stage - 1, i)}
                needs[inputs] = {forward, backward("bwdA", stage + 1, i)}
                needs.setdefault(weights, {inputs})
                if self.ordered:
                    needs[forward] |= {Task("fwd", stage, i - 1)}
                    needs[inputs] |= {backward("bwdA", stage, i - 1)}
                    needs[weights] |= {backward("bwdW", stage, i - 1)}
        return needs


# A schedule from its numbers of stages and groups and, for those that leave something to it, by chance.
SCHEDULES = {
    "GPipe": lambda stages, groups, chance: mpmd.GPipe(stages),
    "Std1F1B": lambda stages, groups, chance: mpmd.Std1F1B(stages),
    "Eager1F1B": lambda stages, groups, chance: mpmd.Eager1F1B(stages),
    "Interleaved1F1B": lambda stages, groups, chance: mpmd.Interleaved1F1B(stages, groups),
    "Shuffled": lambda stages, groups, chance: Shuffled(stages, groups, chance),
    "Unordered": lambda stages, groups, chance: Shuffled(stages, groups, chance, ordered=False),
}


def schedule_of(program):
    """The schedule of a described step."""
    return SCHEDULES[program.schedule](len(program.stages), program.groups, program.chance)


def placements(num_stages):
    """The schedules of that many stages, each with every number of groups that it can have."""
    found = []
    for name, make in SCHEDULES.items():
        for groups in range(1, num_stages + 1):
            try:
                schedule = make(num_stages, groups, 0)
            except ValueError:
                continue
            if schedule.mpmd_dim == groups:
                found.append((name, groups))
    return found
