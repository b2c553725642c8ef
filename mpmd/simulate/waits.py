"""The task that an idle group waits for, in simulated and in recorded steps."""

from __future__ import annotations

from typing import Generic, NamedTuple

from mpmd.simulate.workload import StepTimes, Time, Workload


class Awaited(NamedTuple, Generic[Time]):
    """The message that a group waits for before an operation, and the message's sender.

    Attributes:
      message: the number of the message.
      sender: the operation that sends the message when it ends.
      sent: when the sender has ended and the group is free: from then on, the group waits for the transfer.
      outlasts: whether the sender still runs when the group is free.
    """

    message: int
    sender: int
    sent: Time
    outlasts: bool


def awaited_message(
    workload: Workload, times: StepTimes[Time], operation: int, free: Time
) -> Awaited[Time] | None:
    """The last message to arrive before an operation; ``None`` if the group waits for no message.

    Args:
      free: when the group has ended the operation before.
    """
    message = times.awaited[operation]
    if message < 0 or times.arrivals[message] <= free:
        return None
    sender = workload.messages.senders[message]
    end = times.end(sender)
    return Awaited(message, sender, max(end, free), end > free)
