"""When messages are in memory, and in whose: each transport has its own rule."""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from mpmd.ir.plan import Edge, Free, GroupProgram, Name, Plan, Recv, Run, Send

MessageKey = tuple[Edge, int]
"""The edge and the tag of a message."""


class Holding(enum.StrEnum):
    """Where a message is between its ``send`` and the first use of its values.

    ``RECEIVER``: in the receiver's memory. ``COPIED``: in the receiver's memory; the sender has a copy of the
    message that is on its way. ``KEPT``: in memory of the receiver that is kept for later messages: as much
    as those of an edge can occupy at once. ``SLOTS``: the same, in memory that both processes map.
    ``ELSEWHERE``: in no group's memory.
    """

    RECEIVER = "receiver"
    COPIED = "copied"
    KEPT = "kept"
    SLOTS = "slots"
    ELSEWHERE = "elsewhere"


class EarliestArrival(NamedTuple):
    """When a message can be there at the earliest, whatever the timing.

    Attributes:
      position: how many instructions of the receiver precede the send in any order.
      before: the same of the receiver's step before, if the message can be sent while that runs.
    """

    position: int
    before: int | None


class Stay(NamedTuple):
    """A message in the memory of its receiver, in positions of the receiver's program.

    Attributes:
      used: the instruction that is the first to use one of its values.
      dropped: the instruction that drops the last of its values; the end of the program if it is kept.
      nbytes: on each of the receiver's devices.
    """

    key: MessageKey
    arrival: EarliestArrival
    used: int
    dropped: int
    nbytes: int

    def in_flight(self, end: int) -> Iterator[range]:
        """The positions at which the message may be there and unused."""
        yield range(self.arrival.position, self.used)
        if self.arrival.before is not None:
            yield range(self.arrival.before, end + 1)

    def in_memory(self, end: int) -> Iterator[range]:
        """The positions at which the message, or one of its values, may be there."""
        yield range(self.arrival.position, self.dropped + 1)
        if self.arrival.before is not None:
            yield range(self.arrival.before, end + 1)


def stays(
    plan: Plan,
    program: GroupProgram,
    sizes: Mapping[Name, int],
    arrivals: Mapping[MessageKey, EarliestArrival],
) -> list[Stay]:
    """The messages that a group receives. Each is used at the latest at the end of the program."""
    end = len(program.instructions)
    used: dict[Name, int] = {}
    dropped: dict[Name, int] = {}
    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Recv):
            continue
        for name in instruction.inputs if isinstance(instruction, Run) else instruction.values:
            used.setdefault(name, position)
        if isinstance(instruction, Run):
            donated = plan.executable(instruction.executable).donated
            dropped.update((instruction.inputs[i], position) for i in donated)
        elif isinstance(instruction, Free):
            dropped.update(dict.fromkeys(instruction.values, position))
    return [
        Stay(
            key=(key := ((recv.src, program.mpmd_idx), recv.tag)),
            arrival=arrivals[key],
            used=min(used.get(name, end) for name in recv.values),
            dropped=max(dropped.get(name, end) for name in recv.values),
            nbytes=sum(sizes[name] for name in recv.values),
        )
        for recv in (i for i in program.instructions if isinstance(i, Recv))
    ]


def most_at_once(spans: Iterable[tuple[range, int]]) -> int:
    """The largest sum over the spans that have a position in common."""
    changes: collections.Counter[int] = collections.Counter()
    for span, amount in spans:
        if span:
            changes[span.start] += amount
            changes[span.stop] -= amount
    most = now = 0
    for position in sorted(changes):
        now += changes[position]
        most = max(most, now)
    return most


def kept_bytes(of_edge: Iterable[Stay], end: int) -> int:
    """What is kept for the messages of an edge: of each size, as many as are in memory at once."""
    of_size: dict[int, list[tuple[range, int]]] = collections.defaultdict(list)
    for stay in of_edge:
        of_size[stay.nbytes] += [(span, stay.nbytes) for span in stay.in_memory(end)]
    return sum(map(most_at_once, of_size.values()))


def largest_sent(program: GroupProgram, sizes: Mapping[Name, int]) -> dict[Edge, int]:
    """The bytes, on each device of the sender, of the largest message that a group sends on each edge."""
    largest: dict[Edge, int] = {}
    for send in (i for i in program.instructions if isinstance(i, Send)):
        edge = program.mpmd_idx, send.dst
        largest[edge] = max(largest.get(edge, 0), sum(sizes[name] for name in send.values))
    return largest
