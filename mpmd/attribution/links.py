"""The operation that each operation of a measured step really started after.

It is the sender of the last message that its group waited for while the sender still ran, or else the
operation before it on the group. The time in between is a message's in flight, or handling: an operation's
group takes messages in, drops values, calls an executable; a sender turns to other messages first.
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
    """

    parent: int
    start: int
    message: int
    handling: int
    message_number: int = -1

    @property
    def has_waited(self) -> bool:
        """Whether the parent is on another group, or has sent a message that was waited for."""
        return self.message_number >= 0


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
    time = start
    for receipt in measured.receipts[operation]:
        handling += receipt.start - time
        sender = senders[receipt.message]
        made = min(max(receipt.start, ends[sender]), receipt.end)
        if ends[sender] > receipt.start:  # nothing before mattered
            parent, start, message, handling, number = sender, made, 0, 0, receipt.message
        left = min(max(made, measured.sent[receipt.message]), receipt.end)
        flight = max(min(receipt.arrived, receipt.end) - left, 0)
        message += flight
        handling += receipt.end - made - flight
        time = receipt.end
    return Link(parent, start, message, handling + measured.starts[operation] - time, number)


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
