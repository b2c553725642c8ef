"""Proves, before a plan runs, that it can run.

For each group: every value is defined once, before its use, and has the shape and dtype that its readers were
compiled for; no value is used after its buffer was freed or donated; at the end the group holds the step's
results, the values that the caller keeps, and nothing beside them. For each edge: the receives are the sends,
in the same order and of the same values, and each message is read. For all groups together: they cannot
deadlock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from mpmd.errors import PlanError
from mpmd.ir.plan import Edge, Plan
from mpmd.memory import EarliestArrival, GroupMemory, group_memories
from mpmd.verify.channels import (
    channels_of,
    check_deadlock,
    check_messages,
    check_reads,
    rendezvous_order,
)
from mpmd.verify.lifetimes import check_lifetimes
from mpmd.verify.structure import check_avals, check_structure


@dataclasses.dataclass(frozen=True)
class Verified:
    """The facts about a plan that passed.

    Attributes:
      memory: for each group, the need of each of its devices. Temporaries are unknown until the groups have
        compiled, and the values whose sharding is open count as replicated.
      capacities: for each edge, the most messages of a step that can be in flight at once, sent and not yet
        read, whatever the timing.
      arrivals: when each message can be there at the earliest, by edge and tag.
    """

    memory: tuple[GroupMemory, ...]
    capacities: Mapping[Edge, int]
    arrivals: Mapping[tuple[Edge, int], EarliestArrival]

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """For each group, the most bytes of values that each of its devices holds at once."""
        return tuple(of_group.live_bytes for of_group in self.memory)


def verify(plan: Plan) -> Verified:
    """Checks a plan, in time proportional to its size.

    Raises ``PlanError`` with every fault in the structure of the plan; if there is none, with every fault in
    the lifetimes of values and in the messages; if there is none, with the deadlocks and the unread messages.
    """
    _raise(check_structure(plan))
    faults = [fault for program in plan.programs for fault in check_lifetimes(plan, program)]
    _raise([*check_avals(plan), *faults, *check_messages(plan)])
    order = rendezvous_order(plan)
    _raise(check_deadlock(plan, order))
    _raise(check_reads(plan))
    channels = channels_of(plan, order)
    return Verified(
        memory=group_memories(plan, channels.arrivals),
        capacities=channels.capacities,
        arrivals=channels.arrivals,
    )


def _raise(faults: Iterable[str]) -> None:
    if faults := tuple(faults):
        raise PlanError("\n  ".join(["the plan cannot run:", *faults]))
