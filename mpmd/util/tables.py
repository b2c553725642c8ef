"""Text for people: aligned tables, and short names for many leaves of a pytree."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

_PART_OF_PATH = re.compile(r"\['[^']*'\]|\[[^\]]*\]|\.?\w+|.")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(aligned([header, *rows])) if rows else ""


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] | None = None) -> list[str]:
    """Formats each row as a line, with aligned columns.

    Args:
      left: the columns that are aligned to the left; ``None`` for all. The rest is aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if left is None or i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return [line.rstrip() for line in lines]


def first_few(texts: Iterable[str], shown: int = 3, count: int | None = None) -> str:
    """The first texts; where some are left out, also the number of all.

    Args:
      count: the number of all, where ``texts`` are only the first.
    """
    texts = list(texts)
    count = len(texts) if count is None else count
    return ", ".join(texts[:shown]) + (f", … {count} in all" if count > shown else "")


def ranges(keys: Iterable[str]) -> list[str]:
    """The keys, with consecutive numbers as a range, such as ``0..3``."""
    intervals: list[list[str]] = []
    for key in keys:
        if (
            intervals
            and key.isdigit()
            and intervals[-1][-1].isdigit()
            and int(key) == int(intervals[-1][-1]) + 1
        ):
            intervals[-1] = [intervals[-1][0], key]
        else:
            intervals.append([key])
    return ["..".join(ends) for ends in intervals]


def numbers_text(numbers: Iterable[int]) -> str:
    return ", ".join(ranges(map(str, numbers)))


def group_leaves(keys: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Groups leaves of a pytree that have equal keys: all leaves of a subtree, and of its neighbours.

    Args:
      keys: a key for each path, which is written as by ``jax.tree_util.keystr``.

    Returns: pairs of a name, such as ``params['blocks'][0..3]``, and the paths of the leaves in the group.
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
    """Names several children of a node: ``[0..3, 8]``, ``['a', 'b']`` or ``{.a, .b}``."""
    if len(names) == 1:
        return names[0]
    keys = [name[1:-1] for name in names if name.startswith("[")]
    return f"[{first_few(ranges(keys))}]" if len(keys) == len(names) else f"{{{first_few(names)}}}"


def human_bytes(count: float | None, unknown: str = "unknown") -> str:
    if count is None:
        return unknown
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
