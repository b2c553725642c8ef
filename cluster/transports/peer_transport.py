"""The interface of the transports between processes."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from cluster.tcp.credentials import Credentials
from cluster.transports.inbox import ProcessInbox
from mpmd.runtime.transport import Array, MessageId, Transport


class PeerTransport(Transport, abc.ABC):
    """A ``Transport`` to groups in other processes, with which it has to be connected first.

    Args:
      inbox: where the messages that arrive go; the transports of one group share it.
    """

    def __init__(self, inbox: ProcessInbox):
        self._inbox = inbox

    @abc.abstractmethod
    def listen(self, host: str, credentials: Credentials) -> Any:
        """Lets peers connect, at an address of ``host`` if that is by TCP. Returns the address for them."""

    @abc.abstractmethod
    def connect(self, addresses: Mapping[int, Any]) -> None:
        """Connects with peers, by their numbers, once all peers listen. The peers have to connect, too."""

    @abc.abstractmethod
    def send(self, message: MessageId, arrays: Sequence[Array]) -> None: ...

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        return self._inbox.take(message).open(shardings)

    @property
    def arrived(self) -> int:
        return self._inbox.arrived

    def abort(self, step: int, reason: str) -> None:
        self._inbox.abort(step, reason)

    def trim(self) -> None:
        """Releases memory that no message occupies; the next ``send`` allocates memory again."""
        return

    def interrupt(self) -> None:
        """Ends a ``connect`` that waits for peers, which then raises. May be called from any thread."""
        return

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the connections, also incomplete ones; peers take this group for dead. The inbox stays."""
