"""How groups hand values to one another: the protocol, and the mailbox that implementations share."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import jax

from mpmd.errors import StepAborted

Content = TypeVar("Content")


@dataclasses.dataclass(frozen=True)
class MessageId:
    """Names one message: the step that sends it, the edge, and its place on the edge."""

    step: int
    src: int
    dst: int
    tag: int


class Receipt(Protocol):
    """A posted receive."""

    def result(self) -> Sequence[jax.Array]:
        """Waits for the message. Raises ``StepAborted`` when the step was aborted instead."""
        ...


class Transport(Protocol):
    """One group's end of all its edges.

    Ordering: the messages of an edge are sent and received in ascending tag. Ownership: ``send`` is done
    with the arrays' buffers, or holds references of its own, when it returns, so the caller may free or
    donate them; received arrays belong to the caller. Blocking: ``send`` may block while the receiver's
    capacity for the edge is used up, never for longer; ``recv`` only posts, its receipt blocks. Every
    wait ends when the step is aborted.
    """

    def send(self, message: MessageId, arrays: Sequence[jax.Array]) -> None: ...

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Receipt:
        """Posts a receive; the received arrays will have these shardings."""
        ...

    def abort(self, step: int, reason: str) -> None:
        """Ends every wait of ``step`` at this end, now and later; its messages are dropped."""
        ...

    def close(self) -> None: ...


class Mailbox(Generic[Content]):
    """Messages that have arrived at one group and were not yet taken. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[MessageId, Content] = {}
        self._aborted: dict[int, str] = {}

    def deliver(self, message: MessageId, content: Content) -> None:
        with self._changed:
            if message.step not in self._aborted:
                self._arrived[message] = content
                self._changed.notify_all()

    def take(self, message: MessageId) -> Content:
        """Waits for a message and removes it. Raises ``StepAborted`` when its step was aborted."""
        with self._changed:
            self._changed.wait_for(lambda: message in self._arrived or message.step in self._aborted)
            if message.step in self._aborted:
                raise StepAborted(self._aborted[message.step])
            return self._arrived.pop(message)

    def abort(self, step: int, reason: str) -> None:
        with self._changed:
            self._aborted.setdefault(step, reason)
            for message in [message for message in self._arrived if message.step == step]:
                del self._arrived[message]
            self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class MailboxReceipt(Generic[Content]):
    """A receive from a mailbox; ``place`` turns what arrived into arrays on the group's devices."""

    mailbox: Mailbox[Content]
    message: MessageId
    place: Callable[[Content], Sequence[jax.Array]]

    def result(self) -> Sequence[jax.Array]:
        return self.place(self.mailbox.take(self.message))
