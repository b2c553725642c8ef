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

    A stage adds up the gradients of a microbatch from its last slice to its first.

    Attributes:
      ordered: the tasks of each stage take the microbatches in ascending order.
    """

    chance: int
    ordered: bool = True
    slices: int = 1

    def tasks(self, num_microbatches):
        chance = random.Random(repr((self, num_microbatches)))
        group_of = [stage % self.mpmd_dim for stage in range(self.num_stages)]
        chance.shuffle(group_of)
        halved = set()
        for number in self.numbers.all:
            share = chance.choice([0, 0.5, 1])
            halved |= {(number, i) for i in range(num_microbatches) if chance.random() < share}
        needs = self._needs(num_microbatches, halved)
        lists = [[] for _ in range(self.mpmd_dim)]
        previous = None
        while needs:
            task = chance.choice([task for task, needed in needs.items() if needs.keys().isdisjoint(needed)])
            del needs[task]
            mine = lists[group_of[self.numbers.stage_of(task.stage)]]
            if previous is mine and chance.random() < 0.3:
                mine[-1] = FusedTask((*mine[-1].tasks, task))
            else:
                mine.append(task)
            previous = mine
        return lists

    def _needs(self, num_microbatches, halved):
        """All tasks, each with those that come before it."""

        def backward(half, number, i):
            return Task(half if (number, i) in halved else "bwd", number, i)

        needs = {}
        for number in self.numbers.all:
            stage = self.numbers.stage_of(number)
            for i in range(num_microbatches):
                forward = Task("fwd", number, i)
                inputs, weights = backward("bwdA", number, i), backward("bwdW", number, i)
                needs[forward] = {Task("fwd", before, i) for before in self.numbers.before(number)}
                needs[inputs] = {backward("bwdA", after, i) for after in self.numbers.after(number)}
                needs[inputs].add(forward)
                needs.setdefault(weights, {inputs}).add(backward("bwdW", number + self.num_stages, i))
                if self.ordered:
                    needs[forward] |= {Task("fwd", number, i - 1)}
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
