"""Pytrees: the names that users read for leaves, prefixes, and the leaves that two pytrees have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd.validation import shown


def argument_paths(args: tuple, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The name of every argument leaf, e.g. ``args[0].params['w']`` or ``kwargs['key']``."""
    return tuple(f"args{path}" for path in paths(args)) + tuple(f"kwargs{path}" for path in paths(kwargs))


def named_leaves(name: str, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """The leaves of a pytree of this name, each with its own name, e.g. ``batch['x']``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def paths(tree: Any) -> tuple[str, ...]:
    return tuple(path for path, _ in named_leaves("", tree))


def with_leaves(leaves: Sequence[Any], positions: Iterable[int], values: Iterable[Any]) -> list[Any]:
    """The leaves with ``values`` at ``positions``."""
    changed = list(leaves)
    for i, value in zip(positions, values, strict=True):
        changed[i] = value
    return changed


def array_faults(name: str, tree: Any) -> Iterator[TypeError]:
    for path, leaf in named_leaves(name, tree):
        if not _is_array(leaf):
            yield TypeError(f"{path} must be an array or a number, not {shown(leaf)}")


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, bool | int | float | complex) or (
        hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    )


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """For every leaf of ``tree``, the leaf of ``prefix`` that stands for it.

    Unlike ``jax.tree.broadcast`` it tells a ``None`` that is a leaf of ``prefix`` from one in ``tree``, which
    has no leaves. Raises ``ValueError`` when ``prefix`` is no pytree prefix of ``tree``.
    """
    leaves: list[Any] = []

    def repeat(leaf: Any, part: Any) -> None:
        leaves.extend([leaf] * len(jax.tree.leaves(part)))

    jax.tree.map(repeat, prefix, tree, is_leaf=is_leaf)
    return leaves


class LeafPairs(NamedTuple):
    """The leaves of two pytrees, ``here`` and ``there``, by their paths.

    Attributes:
      only_here, only_there: leaves at paths that the other pytree lacks.
      both: the pairs of leaves at common paths.
      structures: both tree structures, if they differ although all paths are common.
    """

    only_here: Mapping[str, Any]
    only_there: Mapping[str, Any]
    both: Mapping[str, tuple[Any, Any]]
    structures: tuple[Any, Any] | None


def compare(here: Any, there: Any) -> LeafPairs:
    of_here = dict(zip(paths(here), jax.tree.leaves(here), strict=True))
    of_there = dict(zip(paths(there), jax.tree.leaves(there), strict=True))
    structures: tuple[Any, Any] = jax.tree.structure(here), jax.tree.structure(there)
    differ_alone = of_here.keys() == of_there.keys() and structures[0] != structures[1]
    return LeafPairs(
        {path: leaf for path, leaf in of_here.items() if path not in of_there},
        {path: leaf for path, leaf in of_there.items() if path not in of_here},
        {path: (leaf, of_there[path]) for path, leaf in of_here.items() if path in of_there},
        structures if differ_alone else None,
    )
