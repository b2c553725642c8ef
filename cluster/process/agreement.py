"""The processes of a group agree to go on with a step, or to leave it, all at the same point.

Their programs meet in collective operations, which wait for all processes. So when a step is aborted, no
process may leave it before a collective that another one enters. At each point where a process may leave the
step, at its beginning and where a message is awaited, all processes tell rank 0 whether they can go on, and
it tells them whether all can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from cluster.process.world import WorldLostError
from cluster.tcp.connection import Connection
from cluster.tcp.frames import encode, read_frame
from mpmd.errors import StepAborted
from mpmd.runtime.activity import Activity


class Agreement:
    """One process's part in the agreements of its group; a group of one process has nothing to agree on."""

    def __init__(self, rank: int, activity: Activity | None = None):
        self._activity = activity or Activity()
        self._rank = rank
        self._connections: list[Connection] = []

    def connect(self, connections: Iterable[Connection]) -> None:
        """Takes the connections: of rank 0 with every other rank, of every other rank with rank 0."""
        self._connections = list(connections)

    def agree(self, step: int, reason: str | None = None) -> None:
        """Waits until every process of the group has come here, or has left the step.

        Args:
          step: its number; the steps of a process ascend.
          reason: why this process cannot go on with the step; ``None`` when it can.

        Raises: ``StepAborted`` in all processes when one cannot go on, ``WorldLostError`` when one is gone.
        """
        with self._activity.during("agreeing with the other processes of the group"):
            self._agree(step, reason)

    def _agree(self, step: int, reason: str | None) -> None:
        if self._rank:
            self._send(self._connections[0], step, reason)
            reason = self._receive(self._connections[0], step)
        else:
            reasons = [reason]
            try:
                reasons += [self._receive(connection, step) for connection in self._connections]
            except WorldLostError as error:
                self.leave(step, str(error))
                raise
            reason = next((each for each in reasons if each is not None), None)
            for connection in self._connections:
                self._send(connection, step, reason)
        if reason is not None:
            raise StepAborted(reason)

    def leave(self, step: int, reason: str) -> None:
        for connection in self._connections:
            self._send(connection, step, reason)

    @staticmethod
    def _send(connection: Connection, step: int, reason: str | None) -> None:
        with contextlib.suppress(OSError):  # the process is gone, and the driver ends its group
            connection.write(encode(step, reason).pieces)

    @staticmethod
    def _receive(connection: Connection, step: int) -> str | None:
        """The other end's vote on a step; skips its votes on steps that this process has left."""
        try:
            while (frame := read_frame(connection)).number < step:
                pass
        except (EOFError, OSError) as error:
            raise WorldLostError(
                f"a process has lost its connection to another one of its group: {error}"
            ) from error
        if frame.number > step:  # it has never got the request
            raise WorldLostError("a process has missed a step")
        return frame.decode()
