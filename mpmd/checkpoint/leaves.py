"""Checks leaves of pytrees: whether each can be saved, and whether a checkpoint and a target agree."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from orbax import checkpoint as orbax
from orbax.checkpoint import type_handlers

from mpmd.arrays.array import MpmdArray
from mpmd.checkpoint.orbax_internals import EMPTY, STRING, StoredLeaf
from mpmd.checkpoint.restoring import GroupRestoreArgs
from mpmd.compat import key_impl_name
from mpmd.keys import is_key, raw
from mpmd.runtime.storage import stored_dtype


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree, ``None`` and empty nodes included, by Orbax's names of leaves."""
    return dict(_named(tree))


def _named(tree: Any) -> list[tuple[str, Any]]:
    flat = orbax.tree.to_flat_dict(tree, keep_empty_nodes=True)
    return [(".".join(path), leaf) for path, leaf in flat.items()]


def check_savable(tree: Any, types: type_handlers.TypeHandlerRegistry) -> None:
    if not jax.tree.leaves(tree) and not tree:
        raise ValueError("there is nothing to save: the pytree has no leaves")
    leaves = {name: leaf for name, leaf in by_name(tree).items() if not _is_empty(leaf)}
    on_groups = [(name, leaf) for name, leaf in leaves.items() if isinstance(leaf, MpmdArray)]
    counts = collections.Counter(name for name, leaf in _named(tree) if not _is_empty(leaf))
    faults = [
        f"{name} is the name of {count} leaves in a checkpoint; rename all but one"
        for name, count in counts.items()
        if count > 1
    ]
    faults += [f"{name} {fault}" for name, leaf in leaves.items() if (fault := _unsavable(leaf, types))]
    for name, leaf in on_groups:
        if leaf.runtime is not on_groups[0][1].runtime:
            faults.append(
                f"{name} is on another mesh than {on_groups[0][0]}; a mesh saves a checkpoint of its own"
            )
    if faults:
        raise ValueError("this cannot be saved:\n" + "\n".join(faults))


def _unsavable(leaf: Any, types: type_handlers.TypeHandlerRegistry) -> str | None:
    if not types.has(type(leaf)):
        return f"is of the type {type(leaf).__name__}; save arrays, numbers and strings"
    if isinstance(leaf, str):
        return None
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "was deleted, or donated to a step; save that step's result"
    if not np.size(leaf):
        return f"has the shape {np.shape(leaf)}; Orbax does not save empty arrays"
    dtype = raw(leaf).dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
    if stored_dtype(dtype) is None:
        return f"is of the dtype {dtype}, which TensorStore does not store; save it as another one"
    if not isinstance(leaf, MpmdArray) and isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return "is on devices of other processes, too; save what is on groups, or in this process"
    return None


def check_target(
    directory: Any,
    stored: Mapping[str, Any],
    target: Mapping[str, Any],
    args: Mapping[str, Any],
    partial: bool,
) -> None:
    """``stored`` is the result of ``stored_leaves``."""
    faults = [
        *(f"{name} is not in the checkpoint" for name in target if name not in stored),
        *(f"{name} is not in the target" for name in stored if name not in target and not partial),
        *(
            f"{name} is {_text(stored[name])} in the checkpoint, not {_text(_stored_as(leaf))}"
            for name, leaf in target.items()
            if name in stored and leaf is not ... and not _is_readable(stored[name], leaf, args.get(name))
        ),
    ]
    if faults:
        raise ValueError(
            "\n".join([f"the checkpoint {directory} is of another state than the target:", *faults])
            + "\nGive a target with the leaves of the checkpoint, and `...` for those that are not to be "
            "read; make anew what is not there"
        )


def _is_readable(stored: Any, leaf: Any, arg: Any) -> bool:
    """Whether a stored value can be read as a leaf. Orbax reads arrays of any dtype, groups do not.

    Keys of another generator would be other random numbers.
    """
    target = _stored_as(leaf)
    if isinstance(stored, str) or isinstance(target, str):
        return stored == target
    if not getattr(arg, "strict", True):
        return True  # who asks Orbax so wants the array cut or padded
    # A number of Python is stored in the widest dtype of its kind.
    of_python = stored.shape == () and stored.dtype.name in ("int64", "float64")
    is_of_kind = of_python and stored.dtype.kind == target.dtype.kind
    casts = not isinstance(arg, GroupRestoreArgs) and np.can_cast(stored.dtype, target.dtype, "same_kind")
    is_of_dtype = stored.dtype == stored_dtype(target.dtype) or is_of_kind or casts
    is_of_generator = stored.key_impl in (None, target.key_impl)
    return stored.shape == target.shape and is_of_dtype and is_of_generator


def _stored_as(leaf: Any) -> StoredLeaf | str:
    if isinstance(leaf, str):
        return STRING
    if _is_empty(leaf):
        return EMPTY
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    described = raw(array)
    return StoredLeaf(described.shape, described.dtype, key_impl_name(array.dtype) if is_key(array) else None)


def _is_empty(leaf: Any) -> bool:
    return not jax.tree.leaves(leaf)


def _text(stored: StoredLeaf | str) -> str:
    if isinstance(stored, str):
        return stored
    of_keys = f" of keys of {stored.key_impl}" if stored.key_impl else ""
    return f"{stored.dtype}{list(stored.shape)}{of_keys}"
