"""The sources of equations: the user's lines, and the transformations that made them.

A user's line is one of the user's own files. Installed packages, the standard library, JAX and this project's
packages are libraries.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

_JAX = str(Path(jax.__file__).parent) + os.sep
_PROJECT = [str(Path(__file__).parents[3] / package) + os.sep for package in ("mpmd", "cluster")]
_NEVER_NAMED = (_JAX, *_PROJECT, "<")
_STANDARD = re.escape(str(Path(os.__file__).parent))
_LIBRARY = re.compile(rf"(.*[/\\](site|dist)-packages|{_STANDARD})[/\\]")


class SourceFrame(NamedTuple):
    file_name: str
    line_num: int
    function_name: str

    def __str__(self) -> str:
        return f"{self.file_name}:{self.line_num} ({self.function_name})"

    @property
    def is_of_library(self) -> bool:
        return _LIBRARY.match(self.file_name) is not None

    @property
    def path_in_library(self) -> str:
        """The path of a library's file from its package on, such as ``flax/linen/linear.py``."""
        return _LIBRARY.sub("", self.file_name)

    @property
    def package(self) -> str:
        """The package of a library's file, or its module if that is in no package."""
        return PurePath(self.path_in_library).with_suffix("").parts[0]


class SourceLines(NamedTuple):
    """The lines that a value comes from. As text: the user's line, and behind it the library's in brackets.

    Attributes:
      line: the innermost call in the user's own files; if there is none, the innermost one in a library.
      called: the innermost call in a library, if ``line`` leads to it.
    """

    line: SourceFrame
    called: SourceFrame | None

    @classmethod
    def among(cls, calls: Iterable[tuple[str, int, str]]) -> SourceLines | None:
        """The origin of a value that these calls make, innermost first.

        JAX and this project make values for their callers, and are never named: ``None`` if all calls are
        theirs.
        """
        frames = [SourceFrame(*call) for call in calls if not call[0].startswith(_NEVER_NAMED)]
        if not frames:
            return None
        line = next((frame for frame in frames if not frame.is_of_library), frames[0])
        return cls(line, None if line is frames[0] else frames[0])

    def __str__(self) -> str:
        if self.called is None:
            return str(self.line)
        return f"{self.line} [{self.called._replace(file_name=self.called.path_in_library)}]"


def origin_of(eqn: JaxprEqn) -> SourceLines | None:
    """The origin of an equation.

    The calls end where tracing began, so an equation that a pass of the compiler made has none.
    """
    return _origin_of(eqn.source_info.traceback)


@functools.lru_cache(maxsize=4096)  # a function that is called often has the same tracebacks, slow to read
def _origin_of(traceback: Any) -> SourceLines | None:
    frames = traceback.frames if traceback else ()
    return SourceLines.among((frame.file_name, frame.line_num, frame.function_name) for frame in frames)


def nearness_to_user(eqn: JaxprEqn) -> int:
    """2 for an equation with a line of the user's own files, 1 with one of a library only, 0 with none."""
    origin = origin_of(eqn)
    return 0 if origin is None else 2 - origin.line.is_of_library


def line_of(eqn: JaxprEqn) -> str | None:
    """The origin of an equation as text, ``file:line (function)``, if it is known."""
    origin = origin_of(eqn)
    return str(origin) if origin else None


def where(eqn: JaxprEqn) -> str:
    return line_of(eqn) or "an unknown line"


def is_in_scope(eqn: JaxprEqn, name: str) -> bool:
    """Whether an equation was made within ``jax.named_scope(name)``, under any transformations."""
    return name in re.split(r"[/()]", str(eqn.source_info.name_stack))


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether reverse-mode differentiation made this equation, by the transformations in its name stack."""
    return re.search(r"(^|/)(vmap\()*transpose\(", str(eqn.source_info.name_stack)) is not None
