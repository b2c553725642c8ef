"""One task of a step again, from the directory that it was captured to: ``mpmd.replay.load(directory)``.

It needs JAX and numpy alone. ``record.py`` has the format of the directory, which ``mpmd.capture`` writes,
and reads it; ``exported.py`` runs the task, ``report.py`` compares and prints, and
``environment.py`` sets the variables that JAX reads when it is imported. For these the command line must be
able to import this package without JAX, so its names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpmd.replay.captured_task import CapturedTask, Difference, load
    from mpmd.replay.record import Evaluation, Origin, Range

__all__ = ["CapturedTask", "Difference", "Evaluation", "Origin", "Range", "load"]

_OF_RECORDS = ("Evaluation", "Origin", "Range")


def __getattr__(name: str) -> Any:
    if name == "Evaluated":
        raise AttributeError(
            "there is no mpmd.replay.Evaluated any more: the driver evaluates a task's equations when it "
            "captures the task, and load(DIR).record.evaluation has what it found"
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "record" if name in _OF_RECORDS else "captured_task"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
