"""The operation that each operation of a measured step really started after.

It is the sender of the last message that its group waited for, if the sender still ran when the group had
nothing else to do, or else the operation before it on the group. The time in between is a message's in
flight, or handling: an operation's group takes messages in, drops values, calls an executable; a sender turns
to other messages first. ``Simulation.gaps`` names the same sender for a simulated step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from mpmd.attribution.measured import Measured


class Link(NamedTuple):
    """The time between an operation and its parent.

    Attributes:
      parent: the operation that it started after; -1 for the first one of a group.
      start: when the parent ended, as far as the group waited for it: by clocks that are wrong, a message can
        be taken in before it was sent.
      message, handling: the parts of the time from there to the operation's start.
      message_number: of the last message that was waited for; -1 if the group waited for none.
      is_after_sender: whether the parent is the sender of that message, and not the operation before.
    """

    parent: int
    start: int
    message: int
    handling: int
    message_number: int = -1
    is_after_sender: bool = False


@dataclasses.dataclass(frozen=True)
class Links:
    """The link of each operation, and the operations in an order in which parents come first."""

    links: tuple[Link, ...]
    order: tuple[int, ...]

    def __getitem__(self, operation: int) -> Link:
        return self.links[operation]


def links_of(measured: Measured) -> Links:
    """The link of each operation. Takes time linear in the operations and messages."""
    links: list[Link] = []
    for group in measured.groups:
        before = -1
        for operation in measured.operations(group):
            if before < 0:
                links.append(Link(-1, measured.ends[operation], 0, 0))
            else:
                links.append(_link(measured, operation, before))
            before = operation
    return Links(tuple(links), _parents_first(links))


def _link(measured: Measured, operation: int, before: int) -> Link:
    senders, ends = measured.workload.messages.senders, measured.ends
    parent, start, message, handling, number = before, ends[before], 0, 0, -1
    time, is_after_sender = start, False
    for receipt in measured.receipts[operation]:
        sender, flight_start = senders[receipt.message], receipt.start
        if receipt.arrived > receipt.start:  # nothing before mattered
            message, handling, number = 0, 0, receipt.message
            is_after_sender = ends[sender] > ends[before]
            parent = sender if is_after_sender else before
            start = min(ends[sender], receipt.end) if is_after_sender else ends[before]
            time = flight_start = start
        flight_start = min(max(flight_start, measured.sent[receipt.message]), receipt.end)
        flight = max(min(receipt.arrived, receipt.end) - flight_start, 0)
        message += flight
        handling += receipt.end - time - flight
        time = receipt.end
    handling += measured.starts[operation] - time
    return Link(parent, start, message, handling, number, is_after_sender)


def _parents_first(links: list[Link]) -> tuple[int, ...]:
    """The operations ordered so that each comes after its parent."""
    placed, order = [False] * len(links), list[int]()
    for operation in range(len(links)):
        path = []
        while operation >= 0 and not placed[operation]:
            placed[operation] = True
            path.append(operation)
            operation = links[operation].parent
        order += reversed(path)
    return tuple(order)
