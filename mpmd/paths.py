"""What users call the leaves of arguments and results."""

from __future__ import annotations

from typing import Any

import jax


def argument_paths(args: tuple, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The name of every argument leaf, e.g. ``args[0].params['w']`` or ``kwargs['key']``."""
    return tuple(f"args{path}" for path in paths(args)) + tuple(f"kwargs{path}" for path in paths(kwargs))


def paths(tree: Any) -> tuple[str, ...]:
    """The name of every leaf within ``tree``."""
    return tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))
