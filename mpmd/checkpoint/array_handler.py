"""Orbax's way to the groups: a handler of types that has groups write and read ``MpmdArray``s.

What is saved is an ordinary checkpoint of jax arrays. In ``serialize``, each group is asked to copy its
values to host memory, in order with the steps; nobody waits. When Orbax has made the directory, the groups
write, each process to a database of its own, and Orbax merges these when it commits the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import jax
from orbax.checkpoint import future as orbax_futures
from orbax.checkpoint import type_handlers

from mpmd.array import MpmdArray
from mpmd.checkpoint import orbax_internals, restoring, saving
from mpmd.checkpoint.restoring import GroupRestoreArgs


def registry() -> type_handlers.TypeHandlerRegistry:
    """Orbax's handlers of types, and one for ``MpmdArray``. Orbax's own, global registry stays as it is."""
    arrays = MpmdArrayHandler()
    others = [
        (kind, type_handlers.get_type_handler(kind))
        for kind in type_handlers.supported_types()
        if kind is not jax.Array
    ]
    return type_handlers.create_type_handler_registry((MpmdArray, arrays), (jax.Array, arrays), *others)


class MpmdArrayHandler(type_handlers.ArrayHandler):
    """Orbax's handler of jax arrays, which has groups save and restore ``MpmdArray``s.

    One handler for both, because both are noted in the same files.
    """

    def __init__(self) -> None:
        self._store = orbax_internals.metadata_store()
        super().__init__(array_metadata_store=self._store)

    async def serialize(
        self,
        values: Sequence[MpmdArray | jax.Array],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[orbax_futures.Future]:
        """Asks groups to copy their values, and returns futures of all that is left to do.

        Raises: ``ValueError`` for arrays that were deleted, are empty or are on several meshes.
        """
        rows = list(zip(values, infos, args or [type_handlers.SaveArgs()] * len(values), strict=True))
        there = [row for row in rows if isinstance(row[0], MpmdArray)]
        here = [row for row in rows if not isinstance(row[0], MpmdArray)]
        parts = saving.copy_out(saving.leaves_to_save(there))
        futures = list(await super().serialize(*zip(*here, strict=True))) if here else []
        if parts:
            writing = self._write(parts, tuple(futures))
            futures.append(
                orbax_futures.CommitFutureAwaitingContractedSignals(writing, name="mpmd_array_handler")
            )
        return futures

    async def _write(self, parts: Sequence[saving.Part], before: Sequence[orbax_futures.Future]) -> None:
        metadata = await saving.write(parts)
        infos = list({leaf.info.name: leaf.info for part in parts for leaf in part.leaves}.values())
        for future in before:  # Orbax reads its files of metadata, and writes them with more in them
            await asyncio.to_thread(future.result)
        await self._store.write(infos[0].parent_dir, metadata, process_index=0)
        await orbax_internals.write_shardings(infos)

    async def deserialize(
        self,
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.RestoreArgs] | None = None,
    ) -> Sequence[MpmdArray | jax.Array]:
        """Has groups read what is to be there, and Orbax the rest. Raises as ``restoring.read``."""
        args = args or [type_handlers.RestoreArgs()] * len(infos)
        there = [i for i, arg in enumerate(args) if isinstance(arg, GroupRestoreArgs)]
        here = [i for i, arg in enumerate(args) if not isinstance(arg, GroupRestoreArgs)]
        restored: dict[int, MpmdArray | jax.Array] = {}
        for positions, read in ((there, restoring.read), (here, super().deserialize)):
            if positions:
                arrays = await read([infos[i] for i in positions], [args[i] for i in positions])
                restored |= zip(positions, arrays, strict=True)
        return [restored[i] for i in range(len(infos))]
