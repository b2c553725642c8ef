"""The rules by which transports hold messages: when, and in whose memory."""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from mpmd.ir.messages import first_uses
from mpmd.ir.plan import Edge, Free, GroupProgram, MessageKey, Name, Plan, Run, Send
from mpmd.util.grouping import grouped


class Holding(enum.StrEnum):
    """The holders of a message between its ``send`` and the first use of its values.

    ``RECEIVER``: in the receiver's memory. ``COPIED``: in the receiver's memory, and in the sender's until
    the message has arrived. ``KEPT``: in buffers of the receiver that it keeps for later messages of the
    edge, as many as the edge can occupy at once. ``SLOTS``: as ``KEPT``, in memory that both processes map.
    ``ELSEWHERE``: in no group's memory.
    """

    RECEIVER = "receiver"
    COPIED = "copied"
    KEPT = "kept"
    SLOTS = "slots"
    ELSEWHERE = "elsewhere"


class EarliestArrival(NamedTuple):
    """The earliest moment at which a message can arrive, whatever the timing.

    Attributes:
      position: how many instructions of the receiver precede the send in any order.
      before: the number of instructions of the receiver's previous step that precede the send; ``None`` if
        the message cannot be sent while the previous step runs.
    """

    position: int
    before: int | None


class Stay(NamedTuple):
    """A message in the memory of its receiver, in positions of the receiver's program.

    Attributes:
      used: the instruction that is the first to use one of its values.
      dropped: the instruction that drops the last of its values; the end of the program if it is kept.
      nbytes: the bytes on each of the receiver's devices.
    """

    key: MessageKey
    arrival: EarliestArrival
    used: int
    dropped: int
    nbytes: int

    def spans(self, until: int, end: int) -> Iterator[range]:
        """The positions before ``until`` at which the message may be in memory, in a program of ``end``."""
        yield range(self.arrival.position, until)
        if self.arrival.before is not None:
            yield range(self.arrival.before, end + 1)


def stays(
    plan: Plan,
    program: GroupProgram,
    sizes: Mapping[Name, int],
    arrivals: Mapping[MessageKey, EarliestArrival],
) -> list[Stay]:
    """The messages that a group receives. A message without a reader counts as used at the program's end."""
    end = len(program.instructions)
    dropped: dict[Name, int] = {}
    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            donated = plan.executable(instruction.executable).donated
            dropped.update((instruction.inputs[i], position) for i in donated)
        elif isinstance(instruction, Free):
            dropped.update(dict.fromkeys(instruction.values, position))
    return [
        Stay(
            key=key,
            arrival=arrivals[key],
            used=position,
            dropped=max(dropped.get(name, end) for name in values),
            nbytes=sum(sizes[name] for name in values),
        )
        for position, messages in enumerate(first_uses(program))
        for key, values in messages.items()
    ]


def most_at_once(spans: Iterable[tuple[range, int]]) -> int:
    """The largest sum over the spans that have a position in common."""
    changes: collections.Counter[int] = collections.Counter()
    for span, amount in spans:
        if span:
            changes[span.start] += amount
            changes[span.stop] -= amount
    return max(itertools.accumulate((changes[position] for position in sorted(changes)), initial=0))


def kept_bytes(of_edge: Iterable[Stay], end: int) -> int:
    """The bytes kept for the messages of an edge: for each size, the most buffers in memory at once."""
    of_size = grouped(
        (stay.nbytes, (span, stay.nbytes)) for stay in of_edge for span in stay.spans(stay.dropped + 1, end)
    )
    return sum(map(most_at_once, of_size.values()))


def largest_sent(program: GroupProgram, sizes: Mapping[Name, int]) -> dict[Edge, int]:
    """The bytes, on each device of the sender, of the largest message that a group sends on each edge."""
    largest: dict[Edge, int] = {}
    for send in (i for i in program.instructions if isinstance(i, Send)):
        edge = program.mpmd_idx, send.dst
        largest[edge] = max(largest.get(edge, 0), sum(sizes[name] for name in send.values))
    return largest
