"""What the driver asks of a group for one step, and what the group replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mpmd.events import Event

Handle = int
"""The driver's name of a value that lives on groups."""

INLINE_BYTES = 256
"""Results up to this size, a loss or a counter, travel with the reply of the step."""


class Released(NamedTuple):
    """The handles and the numbers of programs that the driver has released since its last request."""

    handles: tuple[Handle, ...] = ()
    programs: tuple[int, ...] = ()

    def and_also(self, other: Released) -> Released:
        """What either of them has."""
        return Released(self.handles + other.handles, self.programs + other.programs)


NOTHING_RELEASED = Released()


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """All that a group needs to know to run one step: the one message it gets from the driver.

    Attributes:
      program: the number of the program to run.
      step: the step's number, equal on all groups; the steps of a group ascend.
      inputs, outputs: a handle for each of the group's inputs and outputs, in plan order.
      host_arrays: the values that the group is sent with this step. They are the group's from now on.
      released: what the group is to drop before the step.
      profile: whether the reply is to have the step's events.
    """

    program: int
    step: int
    inputs: tuple[Handle, ...]
    outputs: tuple[Handle, ...]
    host_arrays: Mapping[Handle, np.ndarray] = dataclasses.field(default_factory=dict)
    released: Released = NOTHING_RELEASED
    profile: bool = False


@dataclasses.dataclass(frozen=True)
class StepReply:
    """What a group tells the driver about a step: its small results, and its events when asked for."""

    inline: Mapping[Handle, np.ndarray]
    events: tuple[Event, ...] = ()
