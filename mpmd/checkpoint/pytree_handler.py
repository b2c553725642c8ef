"""Orbax's handler of pytrees, with checks of leaves, and of a checkpoint's completeness.

Orbax chooses handlers by their exact class; so this is the implementation inside of its own handler.
"""

from __future__ import annotations

import re
from typing import Any

from etils import epath
from orbax import checkpoint as orbax

from mpmd.checkpoint import integrity, leaves, orbax_internals
from mpmd.checkpoint.array_handler import registry
from mpmd.errors import CheckpointError

_DAMAGE = re.compile(
    r"((?:(?:DATA_LOSS|FAILED_PRECONDITION|NOT_FOUND|OUT_OF_RANGE): |Error decoding ).*?)(?: \[|\n|$)"
)
"""TensorStore's errors for missing or altered data, up to the text of the request. For an index with broken
compression, TensorStore only reports that it cannot decode it."""

_KEY = re.compile(r'"([^"]+?)/(?:zarr\.json|\.zarray|c(?:/\d+)*|\d+(?:\.\d+)*)" in OCDBT')
"""The name of an array, in an error with the key of a chunk or of the array's metadata."""


class PyTreeHandler(orbax.BasePyTreeCheckpointHandler):
    """Orbax's handler of pytrees, with a record of all files."""

    def __init__(self) -> None:
        self.types = registry()
        super().__init__(use_zarr3=True, type_handler_registry=self.types)

    async def async_save(self, directory: Any, args: Any) -> Any:
        """Raises ``ValueError`` that lists the leaves that cannot be saved, before anything is written."""
        leaves.check_savable(args.item, self.types)
        return await super().async_save(directory, args=args)

    def finalize(self, directory: epath.Path) -> None:
        """Makes a checkpoint durable, before it gets its name."""
        super().finalize(directory)
        integrity.write_record(directory)
        integrity.sync(directory)
        self.check_saved(directory)

    def check_saved(self, directory: epath.Path) -> None:
        """Raises ``DamagedCheckpointError`` if storage lacks a file or a chunk of the checkpoint."""
        try:
            faults = [*integrity.faults(directory), *integrity.missing(directory)]
            if not faults:
                tree = orbax_internals.stored_tree(self, directory)
                names = orbax_internals.incomplete_arrays(tree, directory)
                faults = [f"{name} lacks chunks" for name in names]
        except (OSError, ValueError) as error:  # of a file that has just vanished
            faults = [f"{type(error).__name__}: {error}"]
        if faults:
            raise integrity.damaged(directory, faults)

    def restore(self, directory: epath.Path, args: Any) -> Any:
        """Raises ``DamagedCheckpointError``, and as ``mpmd.restore`` for leaves and groups."""
        if faults := integrity.faults(directory):
            raise integrity.damaged(directory, faults)
        tree = self._tree(directory)
        try:
            if args.item is not None:
                self._check_target(directory, tree, args)
            return super().restore(directory, args=args)
        except Exception as error:  # of a jax array in this process Orbax raises an ``Exception``
            if damage := _damage_in(error):
                mpmd_idx = error.mpmd_idx if isinstance(error, CheckpointError) else None
                raise integrity.damaged(directory, [damage], mpmd_idx) from error
            raise

    def _tree(self, directory: epath.Path) -> orbax_internals.StoredTree:
        try:
            return orbax_internals.stored_tree(self, directory)
        except Exception as error:  # of any kind, by what the files have in place of a tree
            reason = f"{type(error).__name__}: {error}"
            fault = f"{directory / '_METADATA'} and array_metadatas have no tree: {reason}"
            raise integrity.damaged(directory, [fault]) from error

    def _check_target(self, directory: epath.Path, tree: orbax_internals.StoredTree, args: Any) -> None:
        stored = orbax_internals.stored_leaves(tree, directory)
        restore_args = {} if args.restore_args is None else leaves.by_name(args.restore_args)
        leaves.check_target(directory, stored, leaves.by_name(args.item), restore_args, args.partial_restore)


def _damage_in(error: Exception) -> str | None:
    """The damaged array and its damage, as text, by an error; ``None`` for an error of another cause."""
    text = f"{error}\n{error.__cause__}"
    damage, key = _DAMAGE.search(text), _KEY.search(text)
    of_group = isinstance(error, CheckpointError)
    if damage is None or (of_group and damage[1].startswith("NOT_FOUND")):
        return None  # the second is of a node that does not share the storage: the driver has seen the files
    reader = f"group {error.mpmd_idx} could not read" if isinstance(error, CheckpointError) else "cannot read"
    return f"{reader} {key[1] if key else 'it'}: {damage[1]}"
