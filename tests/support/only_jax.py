"""An environment with JAX and numpy alone: a process in which no other package can be imported."""

import functools
import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def packages_of(name: str, seen: set[str]) -> set[str]:
    """A package and what it needs."""
    seen.add(name)
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and (
            requirement.name not in seen
        ):
            packages_of(requirement.name, seen)
    return seen


def blocked_modules() -> list[str]:
    """The modules of all installed packages that JAX and numpy do not need."""
    allowed = {name.lower().replace("_", "-") for name in packages_of("jax", set()) | {"numpy"}}
    return sorted(
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not allowed & {name.lower().replace("_", "-") for name in packages}
        and module not in ("mpmd", "cluster")
    )


@functools.cache
def without_others() -> str:
    """The beginning of a program that is to run in such an environment."""
    return f"""
import sys

class Blocker:
    names = frozenset({blocked_modules()!r})

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)
        return None

sys.meta_path.insert(0, Blocker())
"""
