"""Values that are gone because the step that makes them has failed."""

from __future__ import annotations

import dataclasses

DONATED_IN_PROCESS = (
    "The arrays that the step was donated are gone as well; without donate_argnums they would still be there"
)
"""The end of messages of failed steps that were donated values of which no group has a copy."""


class LostValueError(RuntimeError):
    """A value is read that was lost when the step that makes it has failed for ``reason``."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"this value was lost when an earlier step failed: {self.reason}"


@dataclasses.dataclass(frozen=True)
class LostValue:
    reason: str
