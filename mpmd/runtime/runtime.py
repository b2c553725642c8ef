"""What the driver sees of the groups, wherever they live."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

import jax
import numpy as np

from mpmd.program import Program
from mpmd.runtime.sent import SentArrays
from mpmd.runtime.worker import Handle, StepReply, StepRequest


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A program that all groups have compiled.

    Attributes:
      number: what step requests call it.
      program: the program, with the specs that it left open.
      seconds: how long it took, by pass: ``resolve``, to have the groups' compiler choose open specs;
        ``export``, where functions travel to other processes; ``load``, until the last group had compiled.
      xla_seconds: for each group, how long XLA compiled; groups compile at the same time.
    """

    number: int
    program: Program
    seconds: Mapping[str, float]
    xla_seconds: tuple[float, ...]


class Runtime(Protocol):
    """The groups of one mesh. Requests to a group are carried out in the order they were made.

    Attributes:
      sent: the arguments that groups keep for later calls.
    """

    sent: SentArrays

    def load(self, program: Program) -> Loaded:
        """Has every group compile its part, and waits until all have."""
        ...

    def submit(self, requests: dict[int, StepRequest]) -> dict[int, Future[StepReply]]:
        """Starts one step: a request for each group. Returns at once.

        A future raises ``TaskError`` when a task of that group failed, ``StepAborted`` when another
        group's did, ``GroupDiedError`` when the group's process is gone.
        """
        ...

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[jax.Array | np.ndarray]:
        """The value under a handle: the jax array in process, a numpy array from elsewhere."""
        ...

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        """Drops a value: groups are told with their next request. Callable from any thread."""
        ...

    def next_handle(self) -> Handle:
        """A handle never used before on this runtime."""
        ...

    def close(self) -> None: ...


class HandleLedger:
    """Numbers handles and remembers, per group, which the driver has dropped. Thread-safe."""

    def __init__(self, num_groups: int):
        self._numbers = itertools.count()
        # A deque's append is atomic: drops come from garbage collection, at any point of any thread.
        self._dropped = [collections.deque[Handle]() for _ in range(num_groups)]

    def next_handle(self) -> Handle:
        return next(self._numbers)

    def drop(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        for mpmd_idx in mpmd_idxs:
            self._dropped[mpmd_idx].append(handle)

    def take_dropped(self, mpmd_idx: int) -> tuple[Handle, ...]:
        dropped = self._dropped[mpmd_idx]
        return tuple(dropped.popleft() for _ in range(len(dropped)))
