"""The sources of equations: the user's lines, and the transformations that made them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

_INSTALLED = str(Path(jax.__file__).parents[1]) + os.sep
_JAX = str(Path(jax.__file__).parent) + os.sep
_MPMD = str(Path(__file__).parents[2]) + os.sep


def user_frames(eqn: JaxprEqn) -> Iterator[Any]:
    """The calls that an equation comes from, innermost first, without those within JAX and this package.

    The frames end where tracing began, so an equation that a pass of the compiler made has none.
    """
    return _frames_without_jax(eqn.source_info.traceback)


def _frames_without_jax(traceback: Any) -> Iterator[Any]:
    frames: Sequence[Any] = traceback.frames if traceback else ()
    for frame in frames:
        if not frame.file_name.startswith((_JAX, _MPMD, "<")):
            yield frame


def is_installed(frame: Any) -> bool:
    """Whether a call is in an installed package rather than in the user's own files."""
    return frame.file_name.startswith(_INSTALLED)


def is_of_user(file_name: str) -> bool:
    """Whether a file is one of the user's own, neither installed nor of this package."""
    return not file_name.startswith((_INSTALLED, _MPMD, "<"))


def package_of(frame: Any) -> str:
    """The installed package that a call is in."""
    return Path(frame.file_name).relative_to(_INSTALLED).parts[0]


def nearness_to_user(eqn: JaxprEqn) -> int:
    """2 for an equation with a line of the user's own files, 1 with one of a library only, 0 with none."""
    return _nearness_to_user(eqn.source_info.traceback)


@functools.lru_cache(maxsize=4096)  # a function that is called often has the same tracebacks, slow to read
def _nearness_to_user(traceback: Any) -> int:
    nearness = 0
    for frame in _frames_without_jax(traceback):
        if not is_installed(frame):
            return 2
        nearness = 1
    return nearness


def line_of(eqn: JaxprEqn) -> str | None:
    """The user's line that an equation comes from, as ``file:line (function)``, if it is known."""
    for frame in user_frames(eqn):
        return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return None


def where(eqn: JaxprEqn) -> str:
    """``line_of`` for messages."""
    return line_of(eqn) or "an unknown line"


def is_in_scope(eqn: JaxprEqn, name: str) -> bool:
    """Whether an equation was made within ``jax.named_scope(name)``, under any transformations."""
    return name in re.split(r"[/()]", str(eqn.source_info.name_stack))


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether reverse-mode differentiation made this equation, by the transformations in its name stack."""
    return re.search(r"(^|/)transpose\(", str(eqn.source_info.name_stack)) is not None
