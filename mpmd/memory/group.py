"""Follows the memory of a group's devices from instruction to instruction, to its worst moment."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping

from mpmd.ir.plan import AnyTask, Edge, GroupProgram, MessageKey, Name, Plan
from mpmd.memory.messages import EarliestArrival, Holding, kept_bytes, largest_sent, stays
from mpmd.memory.sizes import sizes_on_devices
from mpmd.memory.values import held_moments
from mpmd.util.grouping import grouped


@dataclasses.dataclass(frozen=True)
class MemoryParts:
    """The bytes that each device of a group holds at one moment.

    Values count by their purpose, in the order of ``KINDS``; messages and temporaries come last.

    Attributes:
      parameters: the arguments that the step returns updated: weights and optimizer state.
      arguments: the other arguments, such as the batch, and constants.
      accumulators: values to which tasks add, from microbatch to microbatch.
      activations: values that tasks of stages leave for other tasks, such as residuals and gradients.
      outside: results of tasks outside of loops, such as updated weights.
      received: values of messages that the group has begun to use.
      messages: messages that may have arrived and that the group has not begun to use, and further buffers
        that transports keep, as ``Holding`` says.
      temporaries: XLA's own buffers of the task that runs; ``None`` before the groups have compiled.
    """

    parameters: int = 0
    arguments: int = 0
    accumulators: int = 0
    activations: int = 0
    outside: int = 0
    received: int = 0
    messages: int = 0
    temporaries: int | None = None

    @property
    def total(self) -> int:
        """The sum of all known parts."""
        return sum(getattr(self, field.name) or 0 for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class GroupMemory:
    """The bytes that each device of a group needs for a step.

    Attributes:
      live_bytes: the most bytes of values that the group's program holds at once. The outputs of a run count
        together with the inputs that are not donated. The values of a message count from the first use of
        any value of the message.
      peak: the bytes at the worst moment, whatever the timing of messages.
      task: the task that runs at the worst moment, if any.
    """

    live_bytes: int
    peak: MemoryParts
    task: AnyTask | None

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device needs at once: values, messages, and temporaries if known."""
        return self.peak.total


def group_memories(
    plan: Plan,
    arrivals: Mapping[MessageKey, EarliestArrival],
    holdings: Mapping[Edge, Holding] | None = None,
    updated: Collection[Name] = (),
) -> tuple[GroupMemory, ...]:
    """The memory that the devices of each group need for a step of a correct plan.

    Args:
      holdings: where the messages of an edge are; in the receiver's memory unless it says otherwise.
      updated: the arguments that the step returns updated.
    """
    holdings = holdings or {}
    groups = [_Group(plan, program, arrivals, holdings) for program in plan.programs]
    kept = {edge: nbytes for group in groups for edge, nbytes in group.kept.items()}
    return tuple(group.memory(kept, updated) for group in groups)


class _Group:
    def __init__(
        self,
        plan: Plan,
        program: GroupProgram,
        arrivals: Mapping[MessageKey, EarliestArrival],
        holdings: Mapping[Edge, Holding],
    ):
        self._plan = plan
        self._program = program
        self._sizes = sizes_on_devices(plan, program.mpmd_idx)
        self._holdings = holdings
        self._stays = stays(plan, program, self._sizes, arrivals)
        memories = {e.name: e.memory for e in plan.executables_of(program.mpmd_idx)}
        self._compiled = None not in memories.values()
        self._temporaries = {name: memory.temporaries if memory else 0 for name, memory in memories.items()}
        of_edge = grouped(
            (stay.key[0], stay)
            for stay in self._stays
            if self._holding(stay.key[0]) in (Holding.KEPT, Holding.SLOTS)
        )
        end = len(program.instructions)
        self.kept = {edge: kept_bytes(stays_of_edge, end) for edge, stays_of_edge in of_edge.items()}

    def _holding(self, edge: Edge) -> Holding:
        return self._holdings.get(edge, Holding.RECEIVER)

    def memory(self, kept: Mapping[Edge, int], updated: Collection[Name]) -> GroupMemory:
        """The need of the devices, given the bytes that transports keep for the messages of each edge."""
        in_flight = self._in_flight()
        moments = [
            (
                moment,
                in_flight[max(moment.position, 0)],
                self._temporaries[moment.run.executable] if moment.run else 0,
            )
            for moment in held_moments(self._plan, self._program, self._sizes, updated)
            if not moment.is_after_free
        ]
        worst, messages, temporaries = max(moments, key=lambda row: sum(row[0].by_kind) + row[1] + row[2])
        parts = dataclasses.replace(
            MemoryParts(*worst.by_kind),
            messages=messages + self._held_for_sending(kept),
            temporaries=temporaries if self._compiled else None,
        )
        live = max(sum(moment.by_kind) for moment, _, _ in moments)
        return GroupMemory(live, parts, worst.run.task if worst.run else None)

    def _held_for_sending(self, kept: Mapping[Edge, int]) -> int:
        return sum(
            kept[edge] if self._holding(edge) == Holding.SLOTS else nbytes
            for edge, nbytes in largest_sent(self._program, self._sizes).items()
            if self._holding(edge) in (Holding.SLOTS, Holding.COPIED)
        )

    def _in_flight(self) -> list[int]:
        """For each position and the end, the bytes of messages that may have arrived and are unused.

        Where transports keep buffers for an edge, all these buffers count, less the messages in use.
        """
        end = len(self._program.instructions)
        changes = [0] * (end + 2)
        changes[0] = sum(self.kept.values())
        for stay in self._stays:
            holding = self._holding(stay.key[0])
            if holding in (Holding.RECEIVER, Holding.COPIED):
                for span in stay.spans(stay.used, end):
                    if span:
                        changes[span.start] += stay.nbytes
                        changes[span.stop] -= stay.nbytes
            elif holding in (Holding.KEPT, Holding.SLOTS):
                changes[stay.used] -= stay.nbytes
                changes[min(stay.dropped, end) + 1] += stay.nbytes
        return list(itertools.accumulate(changes[:-1]))
