"""The operation that each operation of a measured step really started after.

The parent of an operation is the sender of the last message that its group waited for, if the sender still
ran when the group was free, or else the operation before on the group. The time in between is a message's in
flight, or handling: an operation's group takes messages in, drops values, calls an executable; a sender turns
to other messages first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpmd.attribution.measured import Measured
from mpmd.simulate.waits import awaited_message


class ParentLink(NamedTuple):
    """The time between an operation and its parent.

    Attributes:
      parent: the sender that the group waited for, or the operation before; -1 for a group's first operation.
      start: the end of the parent, or the end of the wait for it where clocks are wrong: there a message can
        be taken in before it was sent.
      driver, late_begin: the parts of the time from the call to ``start`` of a group's first operation: until
        the group had the request, and from then on. 0 for every other operation.
      message, handling: the parts of the time from ``start`` to the start of the operation.
      awaited: the number of the last message that the group waited for; -1 if the group waited for none.
      is_after_sender: whether the parent sent the awaited message; otherwise it is the operation before.
    """

    parent: int
    start: int
    message: int = 0
    handling: int = 0
    awaited: int = -1
    is_after_sender: bool = False
    driver: int = 0
    late_begin: int = 0


def links_of(measured: Measured) -> tuple[ParentLink, ...]:
    links = list[ParentLink]()
    for group in measured.groups:
        first, *later = measured.operations(group)
        began = measured.starts[first]
        received = min(measured.received[group], began)
        links.append(ParentLink(-1, began, driver=received, late_begin=began - received))
        links += [_link(measured, operation) for operation in later]
    return tuple(links)


def _link(measured: Measured, operation: int) -> ParentLink:
    before, begin = operation - 1, measured.starts[operation]
    free = measured.end(before)
    wait = awaited_message(measured.workload, measured, operation, free)
    if wait is None:
        return ParentLink(before, free, handling=begin - free)
    taken = measured.taken[wait.message]
    start = min(wait.sent, taken)
    leaves = min(max(start, measured.sent[wait.message]), taken)
    message = max(min(measured.arrivals[wait.message], taken) - leaves, 0)
    parent = wait.sender if wait.outlasts else before
    return ParentLink(parent, start, message, begin - start - message, wait.message, wait.outlasts)


def parents_first(links: Sequence[ParentLink]) -> list[int]:
    placed, order = [False] * len(links), list[int]()
    for operation in range(len(links)):
        path = []
        while operation >= 0 and not placed[operation]:
            placed[operation] = True
            path.append(operation)
            operation = links[operation].parent
        order += reversed(path)
    return order
