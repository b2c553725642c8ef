"""The parts of Orbax without a public name. No other file of the project uses Orbax's private modules.

A handler that writes arrays has to leave the same files as Orbax's own handler. Orbax's interface of handlers
is public, but the code that writes these files is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as orbax
import tensorstore
from etils import epath
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.metadata import array_metadata, array_metadata_store
from orbax.checkpoint._src.serialization import jax_array_handlers, tensorstore_utils

from mpmd.keys import is_key
from mpmd.runtime.requests import JsonSpec
from mpmd.runtime.storage import stored_dtype

_CODECS = (
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "zstd", "configuration": {"level": 1}},
    {"name": "crc32c"},
)
"""The codecs of a chunk: it is compressed, and has a checksum that TensorStore compares when it reads.

Orbax's own codecs have no checksum of the data: a flipped bit is read as another number.
"""

STRING, EMPTY = "string", "empty"
"""Leaves that are not arrays: strings, and ``None`` and nodes without leaves."""

_ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")
"""Orbax's names for the types of leaves that TensorStore has as arrays."""


class WriteSpec(NamedTuple):
    """TensorStore's specification for writing an array, and Orbax's metadata of the array."""

    opened_by: JsonSpec
    metadata: Any


def metadata_store() -> Any:
    """The store of the shapes of chunks and the implementations of keys beside the arrays.

    Orbax's handler of arrays takes one as an argument, but the class is not public.
    """
    return array_metadata_store.Store()


def write_spec(
    info: type_handlers.ParamInfo,
    args: type_handlers.SaveArgs,
    described: jax.ShapeDtypeStruct,
    shard_shape: tuple[int, ...],
    writer: str,
    key_impl: str | None,
) -> WriteSpec:
    """The specification by which a process writes an array, with the metadata.

    ``type_handlers.get_json_tspec_write`` lacks the metadata.

    Args:
      described: the array's shape and dtype; for keys, of their integers.
      shard_shape: the shape of the parts in which processes write the array.
      writer: the name of the process, of letters and digits, such as ``g0p1``.
      key_impl: the generator of an array of keys; ``None`` for numbers.
    """
    spec = tensorstore_utils.build_array_write_spec(
        info,
        args,
        global_shape=described.shape,
        local_shape=shard_shape,
        dtype=stored_dtype(described.dtype),
        use_ocdbt=True,
        process_index=writer,
        ext_metadata=None if key_impl is None else {array_metadata.RANDOM_KEY_IMPL: key_impl},
    )
    return WriteSpec(with_checksums(spec.json), spec.metadata)


def with_checksums(spec: JsonSpec) -> JsonSpec:
    if spec["driver"] == "cast":
        return {**spec, "base": with_checksums(spec["base"])}
    return {**spec, "metadata": {**spec["metadata"], "codecs": _CODECS}}


async def read_as_stored(
    read: Callable[..., Awaitable[Sequence[Any]]],
    infos: Sequence[type_handlers.ParamInfo],
    args: Sequence[type_handlers.RestoreArgs],
) -> Sequence[Any]:
    """Reads arrays by ``read``, Orbax's ``deserialize``, also arrays of dtypes that TensorStore lacks.

    Orbax would ask TensorStore to cast to the dtype in ``args``.
    """
    lacking = [
        i
        for i, arg in enumerate(args)
        if arg.dtype is not None and not is_key(arg) and stored_dtype(np.dtype(arg.dtype)) != arg.dtype
    ]
    as_stored = [dataclasses.replace(arg, dtype=None) if i in lacking else arg for i, arg in enumerate(args)]
    arrays = [*await read(infos, as_stored)]
    for i in lacking:
        arrays[i] = arrays[i].astype(args[i].dtype)
    return arrays


class _OfAnyDtype:
    """Adds checksums, and dtypes that TensorStore lacks, to Orbax's handlers of numpy arrays and numbers."""

    async def serialize(
        self,
        values: Sequence[np.ndarray],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Any:
        arrays = map(np.asarray, values)
        stored = [array.astype(stored_dtype(array.dtype), copy=False) for array in arrays]
        return await super().serialize(stored, infos, args)  # type: ignore[misc]

    async def deserialize(
        self,
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.RestoreArgs] | None = None,
    ) -> Any:
        args = args or [type_handlers.RestoreArgs()] * len(infos)
        return await read_as_stored(super().deserialize, infos, args)  # type: ignore[misc]

    async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
        await super()._open_and_write(value, with_checksums(tspec), ts_context)  # type: ignore[misc]


class NumpyHandler(_OfAnyDtype, type_handlers.NumpyHandler):
    """Orbax's handler of numpy arrays, with checksums, for any dtype."""


class ScalarHandler(_OfAnyDtype, type_handlers.ScalarHandler):
    """Orbax's handler of numbers, with checksums, for any dtype."""


def read_spec(info: type_handlers.ParamInfo) -> JsonSpec:
    """TensorStore's specification for reading an array; a chunk that was never written is an error.

    ``type_handlers.get_json_tspec_read`` does the same, and is deprecated.
    """
    return tensorstore_utils.build_array_read_spec(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        raise_array_data_missing_error=info.raise_array_data_missing_error,
    ).json


class StoredTree(NamedTuple):
    """The leaves of a checkpoint, by their names.

    Attributes:
      types: Orbax's type of each.
      key_impls: the generator of each array of keys.
      metadata: Orbax's metadata of the tree.
    """

    types: dict[str, str]
    key_impls: dict[str, Any]
    metadata: Any


class StoredLeaf(NamedTuple):
    """A stored array or number; ``key_impl`` is the generator of an array of keys, else ``None``."""

    shape: tuple[int, ...]
    dtype: np.dtype
    key_impl: str | None


def stored_tree(handler: orbax.BasePyTreeCheckpointHandler, directory: epath.Path) -> StoredTree:
    """Reads the tree of a checkpoint. Raises any kind of error where its files have something else."""
    metadata = asyncio_utils.run_sync(handler._read_metadata_file(directory))
    flat = orbax.tree.to_flat_dict(metadata.as_nested_tree())
    types = {".".join(path): entry.value_type for path, entry in flat.items()}
    arrays = asyncio_utils.run_sync(metadata_store().read(directory)) or {}
    extra = {array.param_name: array.ext_metadata for of_one in arrays.values() for array in of_one}
    for name in [*types, *extra]:
        if (name.startswith("/") or ".." in name.split("/")) and not metadata.use_ocdbt:
            raise ValueError(f"{name} is not in the directory")
    key_impls = {
        name: of_array.get(array_metadata.RANDOM_KEY_IMPL) for name, of_array in extra.items() if of_array
    }
    return StoredTree(types, key_impls, metadata)


def stored_leaves(tree: StoredTree, directory: epath.Path) -> dict[str, Any]:
    """A ``StoredLeaf`` for each stored array and number; ``STRING`` or ``EMPTY`` for another leaf.

    ``handler.metadata`` has the same, and reads the file of all shardings once for each array.
    """
    infos = _array_infos(tree, directory)
    # Other than the handler of jax arrays, that of numpy arrays knows the shapes of Python numbers, too.
    arrays = asyncio_utils.run_sync(type_handlers.NumpyHandler().metadata(infos))
    others = {name: STRING if kind == STRING else EMPTY for name, kind in tree.types.items()}
    return others | {
        info.name: StoredLeaf(tuple(array.shape), np.dtype(array.dtype), tree.key_impls.get(info.name))
        for info, array in zip(infos, arrays, strict=True)
    }


def incomplete_arrays(tree: StoredTree, directory: epath.Path) -> list[str]:
    """The names of arrays whose chunks the index lacks.

    Raises ``ValueError`` for an array without metadata.
    """
    opening = {
        info.name: tensorstore.open(tensorstore.Spec(read_spec(info)), open=True, context=info.ts_context)
        for info in _array_infos(tree, directory)
    }
    return [
        name
        for name, opened in opening.items()
        if not opened.result().storage_statistics(query_fully_stored=True).result().fully_stored
    ]


def _array_infos(tree: StoredTree, directory: epath.Path) -> list[type_handlers.ParamInfo]:
    metadata = tree.metadata
    use_ocdbt = metadata.use_ocdbt
    if use_ocdbt is None:
        use_ocdbt = type_handlers.is_ocdbt_checkpoint(directory)
    context = tensorstore_utils.get_ts_context(use_ocdbt=use_ocdbt)
    return [
        type_handlers.ParamInfo(
            name=name,
            parent_dir=directory,
            is_ocdbt_checkpoint=use_ocdbt,
            use_zarr3=metadata.use_zarr3,
            ts_context=context,
        )
        for name, kind in tree.types.items()
        if kind in _ARRAY_TYPES
    ]


async def write_shardings(
    infos: Sequence[type_handlers.ParamInfo], shardings: Sequence[jax.sharding.Sharding]
) -> None:
    """Writes shardings of arrays and keys, which a reader needs that gives no shardings of its own.

    Without them, ``StandardCheckpointer().restore(path)`` fails: "Sharding of jax.Array cannot be None".
    """
    await jax_array_handlers._async_serialize_shardings(shardings, infos, primary_host=0)


def process_directory(writer: str) -> str:
    return f"{tensorstore_utils.PROCESS_SUBDIR_PREFIX}{writer}"
