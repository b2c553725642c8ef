"""Orbax's way to the groups: a handler of types that has groups write and read ``MpmdArray``s.

The result is an ordinary checkpoint of jax arrays. In ``serialize``, the driver asks each group to copy its
values to host memory, in order with the steps, and does not wait. When Orbax has made the directory, each
process of a group writes a database of its own, and Orbax merges the databases when it commits the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from orbax.checkpoint import future as orbax_futures
from orbax.checkpoint import type_handlers

from mpmd.arrays.array import MpmdArray
from mpmd.checkpoint import orbax_internals, restoring, saving
from mpmd.checkpoint.restoring import GroupRestoreArgs


def registry() -> type_handlers.TypeHandlerRegistry:
    """Handlers of the types that can be saved. Orbax's own, global registry stays as it is."""
    arrays, numbers = MpmdArrayHandler(), orbax_internals.ScalarHandler()
    handlers = {
        str: type_handlers.get_type_handler(str),
        type(...): type_handlers.get_type_handler(type(...)),
        MpmdArray: arrays,
        jax.Array: arrays,
        np.ndarray: orbax_internals.NumpyHandler(),
        int: numbers,
        float: numbers,
        complex: numbers,
        np.generic: numbers,
    }
    return type_handlers.create_type_handler_registry(*handlers.items())


class MpmdArrayHandler(type_handlers.ArrayHandler):
    """Orbax's handler of jax arrays, for which groups save and restore ``MpmdArray``s.

    One handler saves both kinds, because both write the same files of metadata.
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
        """Copies arrays, on groups in order with the steps. Returns the future of the write."""
        rows = list(zip(values, infos, args or [type_handlers.SaveArgs()] * len(values), strict=True))
        on_groups = [row for row in rows if isinstance(row[0], MpmdArray)]
        local = [row for row in rows if not isinstance(row[0], MpmdArray)]
        copies = saving.copy_out(saving.leaves_to_save(on_groups))
        writing = self._write(copies, saving.local_leaves(local))
        return [orbax_futures.CommitFutureAwaitingContractedSignals(writing, name="mpmd_array_handler")]

    async def _write(self, copies: Sequence[saving.GroupCopy], local: Sequence[saving.LocalLeaf]) -> None:
        metadata = await saving.write(copies) if copies else []
        metadata += await saving.write_local(local)
        on_groups = {
            leaf.info.name: leaf.info for group_copy in copies for leaf in group_copy.leaves
        }.values()
        infos = [*on_groups, *(leaf.info for leaf in local)]
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = [first] * len(on_groups) + [leaf.array.sharding for leaf in local]
        await self._store.write(infos[0].parent_dir, metadata, process_index=0)
        await orbax_internals.write_shardings(infos, shardings)

    async def deserialize(
        self,
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.RestoreArgs] | None = None,
    ) -> Sequence[MpmdArray | jax.Array]:
        args = args or [type_handlers.RestoreArgs()] * len(infos)
        on_groups = [i for i, arg in enumerate(args) if isinstance(arg, GroupRestoreArgs)]
        local = [i for i, arg in enumerate(args) if not isinstance(arg, GroupRestoreArgs)]
        restored: dict[int, MpmdArray | jax.Array] = {}
        read_here = partial(orbax_internals.read_as_stored, super().deserialize)
        for positions, read in ((on_groups, restoring.read), (local, read_here)):
            if positions:
                arrays = await read([infos[i] for i in positions], [args[i] for i in positions])
                restored |= zip(positions, arrays, strict=True)
        return [restored[i] for i in range(len(infos))]
