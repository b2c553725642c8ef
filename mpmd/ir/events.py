"""Events: the activities of groups in a step, with their times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from mpmd.ir.plan import AnyTask
from mpmd.validation import raise_faults, type_fault


@dataclasses.dataclass(frozen=True)
class Wait:
    """The wait of a group for a message of another group; prints as ``wait for group 2``.

    Attributes:
      tag: the number of the message on its edge; ``None``: unknown.
    """

    src: int
    tag: int | None = None

    def __str__(self) -> str:
        return f"wait for group {self.src}"


@dataclasses.dataclass(frozen=True)
class Event:
    """A group's activity from ``start`` to ``end``, in seconds of a clock that all groups share."""

    mpmd_idx: int
    activity: AnyTask | Wait
    start: float
    end: float

    @property
    def label(self) -> str:
        """The activity as text, e.g. ``fwd_2__1``, ``after_0`` or ``wait for group 2``."""
        return str(self.activity)

    @property
    def duration(self) -> float:
        return self.end - self.start


def checked_events(name: str, events: Any) -> list[Event]:
    """Returns the events of the argument ``name`` as a list.

    Raises ``TypeError`` for items of other types, and for an object with ``events``, such as a profile.
    """
    if not isinstance(events, list | tuple) and hasattr(events, "events"):
        raise TypeError(
            f"{name} must be the events of a step, and not the {type(events).__name__} that has them: pass "
            "its .events"
        )
    raise_faults(type_fault(name, events, Iterable, "the events of a step"))
    listed = list(events)
    raise_faults(*(type_fault(f"{name}[{i}]", event, Event, "an Event") for i, event in enumerate(listed)))
    return listed
