"""Follows the memory of a group's devices from instruction to instruction, to its worst moment."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from mpmd.ir.plan import AnyTask, Edge, GroupProgram, Name, Plan, Run
from mpmd.memory.kinds import KINDS, Kind, kinds_of
from mpmd.memory.messages import EarliestArrival, Holding, MessageKey, Stay, kept_bytes, largest_sent, stays
from mpmd.memory.sizes import sizes_on_devices
from mpmd.memory.values import held_moments


@dataclasses.dataclass(frozen=True)
class MemoryParts:
    """The bytes that each device of a group holds at one moment.

    Attributes:
      parameters: the arguments that the step returns updated: weights and optimizer state.
      arguments: the other arguments, such as the batch, and constants.
      accumulators: values to which tasks add, from microbatch to microbatch.
      activations: values that tasks of stages leave for other tasks, such as residuals and gradients.
      outside: values that are made outside of loops, such as updated weights.
      received: values of messages that the group has begun to use.
      messages: messages that may be there and that the group has not begun to use, and what the transports
        keep for messages beyond that, as ``Holding`` says.
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
        together with those of its inputs that are not donated to them. The values of a message count from the
        first use of any of them.
      peak: that at the worst moment, whatever the timing of messages.
      task: the task that runs then, if any.
    """

    live_bytes: int
    peak: MemoryParts
    task: AnyTask | None

    @property
    def peak_bytes(self) -> int:
        """The most that a device needs at once: values, temporaries as far as they are known, messages."""
        return self.peak.total


class _Moment(NamedTuple):
    """A moment in a group's program; ``in_flight`` are the bytes of messages that are not in use."""

    run: Run | None
    by_kind: tuple[int, ...]
    temporaries: int
    in_flight: int

    @property
    def live(self) -> int:
        """The bytes of values."""
        return sum(self.by_kind)

    @property
    def total(self) -> int:
        return self.live + self.temporaries + self.in_flight


def group_memories(
    plan: Plan,
    arrivals: Mapping[MessageKey, EarliestArrival],
    holdings: Mapping[Edge, Holding] | None = None,
    updated: Collection[Name] = (),
) -> tuple[GroupMemory, ...]:
    """The memory that the devices of each group need for a step of a correct plan.

    Args:
      arrivals: when each message can be there.
      holdings: where the messages of an edge are; in the receiver's memory unless it says otherwise.
      updated: the arguments that the step returns updated.
    """
    holdings = holdings or {}
    groups = [_Group(plan, program, arrivals, holdings) for program in plan.programs]
    kept = {edge: nbytes for group in groups for edge, nbytes in group.kept.items()}
    return tuple(group.memory(kept, updated) for group in groups)


class _Group:
    """A group with the needs of its messages and its executables."""

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
        of_edge: dict[Edge, list[Stay]] = collections.defaultdict(list)
        for stay in self._stays:
            if self._holding(stay.key[0]) in (Holding.KEPT, Holding.SLOTS):
                of_edge[stay.key[0]].append(stay)
        end = len(program.instructions)
        self.kept = {edge: kept_bytes(stays_of_edge, end) for edge, stays_of_edge in of_edge.items()}

    def _holding(self, edge: Edge) -> Holding:
        return self._holdings.get(edge, Holding.RECEIVER)

    def memory(self, kept: Mapping[Edge, int], updated: Collection[Name]) -> GroupMemory:
        """The memory of the devices, given the bytes that are kept for the messages of all edges."""
        moments = list(self._moments(kinds_of(self._plan, self._program, updated)))
        worst = max(moments, key=lambda moment: moment.total)
        parts = MemoryParts(
            **dict(zip(KINDS, worst.by_kind, strict=True)),
            messages=worst.in_flight + self._of_sent(kept),
            temporaries=worst.temporaries if self._compiled else None,
        )
        live = max(moment.live for moment in moments)
        return GroupMemory(live, parts, worst.run.task if worst.run else None)

    def _of_sent(self, kept: Mapping[Edge, int]) -> int:
        """The bytes that transports hold here of the messages that the group sends."""
        return sum(
            kept[edge] if self._holding(edge) == Holding.SLOTS else nbytes
            for edge, nbytes in largest_sent(self._program, self._sizes).items()
            if self._holding(edge) in (Holding.SLOTS, Holding.COPIED)
        )

    def _moments(self, kinds: Mapping[Name, Kind]) -> Iterator[_Moment]:
        """The moments from before the first instruction to after the last one."""
        in_flight = self._in_flight()
        for moment in held_moments(self._plan, self._program, self._sizes, kinds):
            if not moment.is_after_free:
                temporaries = self._temporaries[moment.run.executable] if moment.run else 0
                yield _Moment(moment.run, moment.by_kind, temporaries, in_flight[max(moment.position, 0)])

    def _in_flight(self) -> list[int]:
        """For each position and the end, the bytes of messages that may be there and unused.

        Where memory is kept, all that is kept for the edge counts, less what is in use.
        """
        end = len(self._program.instructions)
        changes = [0] * (end + 2)
        changes[0] = sum(self.kept.values())
        for stay in self._stays:
            holding = self._holding(stay.key[0])
            if holding in (Holding.RECEIVER, Holding.COPIED):
                for span in stay.in_flight(end):
                    if span:
                        changes[span.start] += stay.nbytes
                        changes[span.stop] -= stay.nbytes
            elif holding in (Holding.KEPT, Holding.SLOTS):
                changes[stay.used] -= stay.nbytes
                changes[min(stay.dropped, end) + 1] += stay.nbytes
        amounts, now = [], 0
        for change in changes[:-1]:
            now += change
            amounts.append(now)
        return amounts
