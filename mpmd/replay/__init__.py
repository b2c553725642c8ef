"""One task of a step again, from the directory that it was captured to: ``mpmd.replay.load(directory)``.

It needs JAX and numpy alone. ``record.py`` has the format of the directory, which ``mpmd.capture`` writes;
``captured_task.py`` reads it, ``evaluate.py`` evaluates the equations one by one, ``report.py`` says what
becomes of them, and ``environment.py`` has the variables that JAX reads when it is imported. So the names of
this package are imported when they are first used: the command line sets these variables before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpmd.replay.captured_task import CapturedTask, Difference, Evaluation, load
    from mpmd.replay.evaluate import Evaluated, Origin
    from mpmd.replay.values import Range

__all__ = ["CapturedTask", "Difference", "Evaluated", "Evaluation", "Origin", "Range", "load"]

_MODULES = {"Evaluated": "evaluate", "Origin": "evaluate", "Range": "values"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'captured_task')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
