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
    path = _origin(package)
    if path is None or path.parent != _INSTALLED / package:
        which = "no module" if path is None else str(path)
        raise ImportError(
            f"Python finds {which} where mpmd needs its package {package!r}, which is in "
            f"{_INSTALLED / package}: {_remedy(path)}",
            name=package,
            path=None if path is None else str(path),
        )


def _origin(package: str) -> Path | None:
    module = sys.modules.get(package)
    if module is not None:
        path = getattr(module, "__file__", None)
    else:
        spec = importlib.util.find_spec(package)
        path = None if spec is None else spec.origin
    return None if path is None else Path(path).resolve()


def _remedy(path: Path | None) -> str:
    if path is None:
        return "install mpmd again"
    what = f"folder {path.parent}" if path.name == "__init__.py" else "file"
    return f"rename the {what}, and start Python again"
