"""The interface of the transports between processes."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cluster.tcp.connection import Connection
from cluster.tcp.credentials import Credentials
from cluster.transports.inbox import ProcessInbox
from mpmd.runtime.transport import Array, MessageId


class MessageSender(Protocol):
    def send(self, message: MessageId, arrays: Sequence[Array]) -> None: ...


class PeerTransport(abc.ABC):
    """A way to groups in other processes, with which it has to be connected first.

    Args:
      inbox: where the messages that arrive go; the transports of one group share it.
    """

    def __init__(self, inbox: ProcessInbox):
        self._inbox = inbox

    def listen(self, host: str, credentials: Credentials) -> Any:
        """Listens for peers. Returns their address for ``connect``, unless a TCP connection is enough."""
        return None

    @abc.abstractmethod
    def connect(
        self, addresses: Mapping[int, Any], connections: Mapping[int, Connection]
    ) -> Mapping[int, MessageSender]:
        """Connects with peers, by their numbers, once all peers listen. The peers have to connect, too.

        Args:
          addresses: the result of ``listen`` of each peer.
          connections: the TCP connections with peers, by number, for transports that need them.
        """

    def begin_step(self, step: int) -> None:
        """Lets peers send messages of the next step: the group begins ``step``."""
        return

    def trim(self) -> None:
        """Releases memory that no message occupies; the next ``send`` allocates memory again."""
        return

    def interrupt(self) -> None:
        """Ends a ``connect`` that waits for peers, which then raises. May be called from any thread."""
        return

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the connections, also incomplete ones; peers take this group for dead. The inbox stays."""
