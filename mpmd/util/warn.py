"""Warnings at the line of the user's that has led to them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import jax

_PROJECT = Path(__file__).parents[2]

_NOT_OF_USER = (
    str(_PROJECT / "mpmd") + os.sep,
    str(_PROJECT / "cluster") + os.sep,
    str(Path(jax.__file__).parent) + os.sep,
    contextlib.__file__,
    functools.__file__,
)


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the innermost call outside of this package and JAX."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_OF_USER):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
