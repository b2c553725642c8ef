"""Sets JAX up in a process of a group: its compilation cache, and the group's devices."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cluster.environment import refusal
from mpmd.ir.reshard import GroupShape
from mpmd.util.private_directory import fault_of, make_private

_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")


def keep_compiled(directory: str | None) -> None:
    """Has JAX write all that it compiles to a directory, and look there before it compiles.

    A directory that the user has named in JAX's own variable stays; ``None`` names no other. An entry that
    cannot be read, because a process was killed while it wrote, is deleted, and written again.

    Raises: ``RuntimeError`` when others than the user may have written to the directory.
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
        raise RuntimeError(refusal(fault))
    warnings.filterwarnings("always", _UNREADABLE.pattern)
    warnings.showwarning = functools.partial(_show_and_repair, warnings.showwarning, directory)


def _show_and_repair(show: Callable[..., None], directory: str, message: Warning | str, *others: Any) -> None:
    """Takes the place of ``warnings.showwarning``.

    JAX warns of an entry that it cannot read; then it compiles, and writes the entry, if there is none. The
    warning has the executable's name alone, so all entries of this name are deleted. Those of other shapes or
    programs are compiled again when they are needed.
    """
    show(message, *others)
    if found := _UNREADABLE.match(str(message)):
        for entry in glob.glob(os.path.join(glob.escape(directory), f"{glob.escape(found[1])}-*")):
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                os.remove(entry)


def submesh_of(mpmd_idx: int, shape: GroupShape) -> jax.sharding.Mesh:
    """The group's submesh; each of several processes gives it as many of its devices.

    Raises: ``RuntimeError`` when a process has too few, or none of its platform.
    """
    needed = shape.devices_per_process
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # what JAX raises depends on which plugins it found
        platform = os.environ["JAX_PLATFORMS"]
        raise RuntimeError(f"JAX finds no devices of the platform {platform!r} here: {error!r}") from error
    if len(devices) < needed:
        raise RuntimeError(
            f"group {mpmd_idx} needs {needed} devices in each process for its submesh "
            f"{dict(shape.axes)}, but this one has {len(devices)}: {', '.join(map(str, devices))}"
        )
    taken = [d for process in range(jax.process_count()) for d in jax.local_devices(process)[:needed]]
    return jax.sharding.Mesh(np.array(taken).reshape(tuple(shape.axes.values())), tuple(shape.axes))
