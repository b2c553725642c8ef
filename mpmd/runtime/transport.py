"""How groups hand values to one another: the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

Array = jax.Array | np.ndarray
"""A value as executables take it: on the group's devices, or still in the host's memory."""


class MessageId(NamedTuple):
    """Names one message: the step that sends it, the edge, and its place on the edge."""

    step: int
    src: int
    dst: int
    tag: int


class Transport(Protocol):
    """One group's end of all its edges.

    Ordering: the messages of an edge are sent in ascending tag, and received in any order. Ownership:
    ``send`` is done with the arrays' buffers, or holds references of its own, when it returns, so the caller
    may free or donate them; received arrays belong to the caller, who does not write to them. Blocking:
    ``send`` does not block while the receiver is at the same step or at the one before; messages travel
    without being asked for, and ``recv`` waits until one is there. Every wait ends when the step is aborted.
    """

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None: ...

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        """Waits for a message, and removes it; its values have these shardings, or are in the host's memory.

        Raises: ``StepAborted`` when the step was aborted instead.
        """
        ...

    def abort(self, step: int, reason: str) -> None:
        """Ends every wait of ``step`` at this end, now and later; its messages are dropped."""
        ...

    def close(self) -> None: ...
