"""The directory in which JAX keeps what the processes of groups compile."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpmd.util.private_directory import fault_of, make_private

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"

_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")


def check_cache(compilation_cache: str | os.PathLike[str] | None, variables: Mapping[str, str]) -> None:
    """Raises ``ValueError`` when another user may have written to the compilation cache on this node.

    Args:
      variables: the environment variables that the user wants in the processes.
    """
    directory = variables.get(CACHE_VARIABLE) or compilation_cache
    if directory is not None and (fault := fault_of(os.path.expanduser(directory))):
        raise ValueError(_refusal(fault))


def keep_compiled(directory: str | None) -> None:
    """Has JAX write all that it compiles to a directory, and look there before it compiles.

    A directory that the user has named in JAX's own variable stays; ``None`` names no other. An entry that
    cannot be read, because a process was killed while it wrote, is deleted, and written again.

    Raises: ``RuntimeError`` when another user may have written to the directory.
    """
    if jax.config.jax_compilation_cache_dir is None and directory is not None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
        # By default JAX keeps only what took long to compile; a pipeline has many small executables.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    directory = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if directory is None:
        return
    make_private(directory)
    if fault := fault_of(directory):
        raise RuntimeError(_refusal(fault))
    warnings.filterwarnings("always", _UNREADABLE.pattern)
    warnings.showwarning = functools.partial(_show_and_repair, warnings.showwarning, directory)


def _show_and_repair(show: Callable[..., None], directory: str, message: Warning | str, *others: Any) -> None:
    """Takes the place of ``warnings.showwarning``.

    JAX warns of an entry that it cannot read; then it compiles, and writes the entry, if there is none. The
    warning has the executable's name alone, so all entries of this name are deleted. Entries of other shapes
    or programs are compiled again when they are needed.
    """
    show(message, *others)
    if unreadable := _UNREADABLE.match(str(message)):
        for entry in glob.glob(os.path.join(glob.escape(directory), f"{glob.escape(unreadable[1])}-*")):
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                os.remove(entry)


def _refusal(fault: str) -> str:
    return (
        f"the compilation cache is refused, because your processes execute what is in it: {fault} "
        f"(compilation_cache=..., or {CACHE_VARIABLE})"
    )
