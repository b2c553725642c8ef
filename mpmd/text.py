"""Text for people: aligned tables, and short names for many things."""

from __future__ import annotations

import collections
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

_PART_OF_PATH = re.compile(r"\['[^']*'\]|\[[^\]]*\]|\.?\w+|.")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; nothing at all without rows."""
    return "\n".join(aligned([header, *rows])) if rows else ""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with the columns to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def few(texts: Iterable[str], shown: int = 3) -> str:
    """The first of them; the number of all where some are left out."""
    texts = list(texts)
    return ", ".join(texts[:shown]) + (f", … {len(texts)} in all" if len(texts) > shown else "")


def ranges(keys: Iterable[str]) -> list[str]:
    """The keys, with consecutive numbers as one, such as ``0..3``."""
    found: list[list[str]] = []
    for key in keys:
        if found and key.isdigit() and found[-1][-1].isdigit() and int(key) == int(found[-1][-1]) + 1:
            found[-1] = [found[-1][0], key]
        else:
            found.append([key])
    return ["..".join(ends) for ends in found]


def gather(keys: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Puts leaves of a pytree with equal keys together: those that fill a subtree, and neighbouring subtrees.

    Args:
      keys: a key for each path, which is written as by ``jax.tree_util.keystr``.

    Returns: pairs of a name, such as ``params['blocks'][0..3]``, and the paths it stands for.
    """
    parts = {path: tuple(_PART_OF_PATH.findall(path)) for path in keys}
    below: dict[tuple[str, ...], set[Hashable]] = collections.defaultdict(set)
    for path, key in keys.items():
        for depth in range(1, len(parts[path]) + 1):
            below[parts[path][:depth]].add(key)
    siblings: dict[tuple[tuple[str, ...], Hashable], dict[str, list[str]]] = {}
    for path, key in keys.items():
        prefixes = (parts[path][:depth] for depth in range(1, len(parts[path]) + 1))
        *parent, last = next(prefix for prefix in prefixes if len(below[prefix]) == 1)
        siblings.setdefault((tuple(parent), key), {}).setdefault(last, []).append(path)
    groups = [
        ("".join(parent) + _joined(list(children)), [path for paths in children.values() for path in paths])
        for (parent, _), children in siblings.items()
    ]
    return [(paths[0] if len(paths) == 1 else name, paths) for name, paths in groups]


def _joined(names: Sequence[str]) -> str:
    """One name for children of a node: ``[0..3, 8]``, ``['a', 'b']`` or ``{.a, .b}``."""
    if len(names) == 1:
        return names[0]
    keys = [name[1:-1] for name in names if name.startswith("[")]
    return f"[{few(ranges(keys))}]" if len(keys) == len(names) else f"{{{few(names)}}}"
