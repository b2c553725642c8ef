"""Modules of a user's that have the name of one of the project's packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_INSTALLED = Path(__file__).resolve().parents[2]
"""The folder in which the project's packages are side by side."""


def check_not_shadowed(package: str) -> None:
    """Checks that Python finds the project's own package of this name; it does not import it.

    Raises: ``ImportError`` with the file that Python finds, and the remedy.
    """
    found = _origin(package)
    if found is None or found.parent != _INSTALLED / package:
        which = "no module" if found is None else str(found)
        raise ImportError(
            f"Python finds {which} where mpmd needs its package {package!r}, which is in "
            f"{_INSTALLED / package}: {_remedy(found)}",
            name=package,
            path=None if found is None else str(found),
        )


def _origin(package: str) -> Path | None:
    """The file that an import of the name takes, or has taken."""
    module = sys.modules.get(package)
    if module is not None:
        path = getattr(module, "__file__", None)
    else:
        spec = importlib.util.find_spec(package)
        path = None if spec is None else spec.origin
    return None if path is None else Path(path).resolve()


def _remedy(found: Path | None) -> str:
    if found is None:
        return "install mpmd again"
    what = f"folder {found.parent}" if found.name == "__init__.py" else "file"
    return f"rename the {what}, and start Python again"
