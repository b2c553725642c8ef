"""The protocol by which groups exchange messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

Array = jax.Array | np.ndarray
"""A value as executables take it: on the group's devices, or in the host's memory."""


class MessageId(NamedTuple):
    step: int
    src: int
    dst: int
    tag: int


class Transport(Protocol):
    """One group's ends of all its edges.

    Ordering: the messages of an edge are sent in ascending tag, and received in any order. Ownership: when
    ``send`` returns, the caller may free or donate the arrays, as the transport has copied them or refers
    to their buffers; received arrays belong to the caller, who does not write to them. Blocking: ``send``
    does not block while the receiver is at the same step or at the step before; a message is sent without a
    request, and ``recv`` waits until it has arrived. Every wait ends when the step is aborted.

    Attributes:
      arrived: when the last message that ``recv`` returned arrived at this end, in nanoseconds of
        ``time.perf_counter_ns``.
    """

    @property
    def arrived(self) -> int: ...

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None: ...

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        """Waits for a message and removes it. Its values have these shardings, or are in the host's memory.

        Raises: ``StepAborted`` when the step was aborted instead.
        """
        ...
