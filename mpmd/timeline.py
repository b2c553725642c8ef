"""What a group did in one step, and when."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Event:
    """Something a group did from ``start`` to ``end``, in seconds of a clock that all groups share.

    ``label`` is the text of a schedule's cell (``fwd_2__1``, ``FusedTask(fwd_3__0, bwd_3__0)``), or other
    text: ``after_0`` is work outside the microbatch loop, and what begins with ``wait`` is no work.
    """

    mpmd_idx: int
    label: str
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start
