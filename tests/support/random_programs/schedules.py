"""The schedules of random programs: all families of the package, and lists of tasks by chance."""

from __future__ import annotations

import dataclasses
import functools
import random

import mpmd
from mpmd.ir.plan import FusedTask, Task
from mpmd.schedules import FAMILIES


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


def make(name, num_stages, groups, chance):
    """The schedule of a size. Raises ``ValueError`` when the family has none of that size."""
    if name not in FAMILIES:
        return Shuffled(num_stages, groups, chance, ordered=name == "Shuffled")
    schedule = FAMILIES[name].schedule.of_size(num_stages, groups)
    fuses = chance % 2 and hasattr(schedule, "fuse_steady_state")
    return dataclasses.replace(schedule, fuse_steady_state=True) if fuses else schedule


@functools.cache
def placements(num_stages, num_microbatches, trains):
    """The names of the schedules for such a loop, each with the numbers of groups that it takes."""
    found = []
    for name in (*FAMILIES, "Shuffled", "Unordered"):
        for groups in range(num_stages, 0, -1):
            try:
                make(name, num_stages, groups, 0).tasks(num_microbatches)
            except ValueError:
                continue
            if not trains or name != "ForwardOnly":
                found.append((name, groups))
    return found
