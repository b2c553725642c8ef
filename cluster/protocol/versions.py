"""Versions of JAX and Python: the driver and all processes of groups need the same ones."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jaxlib


class Versions(NamedTuple):
    """The versions that a process runs; Python's without the patch level."""

    jax: str
    jaxlib: str
    python: str

    def __str__(self) -> str:
        return f"JAX {self.jax}, jaxlib {self.jaxlib}, Python {self.python}"


def versions_here() -> Versions:
    return Versions(jax.__version__, jaxlib.__version__, ".".join(platform.python_version_tuple()[:2]))


def check_versions(driver: Versions, processes: Mapping[str, Versions]) -> None:
    """Compares what the driver has with what the processes have, by their names.

    Programs travel from the driver to the groups in JAX's export format, and the processes of a group
    compile parts of one computation.

    Raises: ``RuntimeError`` that names all processes with other versions than the driver's.
    """
    others = [f"  {name}: {versions}" for name, versions in processes.items() if versions != driver]
    if others:
        raise RuntimeError(
            "the driver and all processes of groups need the same versions of JAX, jaxlib and Python:\n"
            + "\n".join([f"  the driver: {driver}", *others])
            + "\nInstall the same on all nodes, or have Ray's runtime_env do so"
        )
