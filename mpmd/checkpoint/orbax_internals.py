"""What Orbax has no public name for. Nothing else in the project reaches below its public modules.

A handler that writes arrays has to leave the same files as Orbax's own. It is public how handlers are made
and registered, but not how these files are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata, array_metadata_store
from orbax.checkpoint._src.serialization import jax_array_handlers, tensorstore_utils

from mpmd.runtime.storage import JsonSpec


class WriteSpec(NamedTuple):
    """What TensorStore opens an array by to write it, and what Orbax notes of the array."""

    opened_by: JsonSpec
    metadata: Any


def metadata_store() -> Any:
    """What keeps the shapes of chunks and the implementations of keys beside the arrays.

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
    """How a process is to write an array. ``type_handlers.get_json_tspec_write`` is without the metadata.

    Args:
      described: the array's shape and dtype; those of the integers inside of keys.
      shard_shape: of the parts in which it is written.
      writer: names the process among all that write, by letters and digits.
      key_impl: the generator of keys; ``None`` of other arrays.
    """
    spec = tensorstore_utils.build_array_write_spec(
        info,
        args,
        global_shape=described.shape,
        local_shape=shard_shape,
        dtype=described.dtype,
        use_ocdbt=True,
        process_index=writer,
        ext_metadata=None if key_impl is None else {array_metadata.RANDOM_KEY_IMPL: key_impl},
    )
    return WriteSpec(spec.json, spec.metadata)


def read_spec(info: type_handlers.ParamInfo) -> JsonSpec:
    """What TensorStore opens an array by to read it; a part that was never written is an error.

    ``type_handlers.get_json_tspec_read`` does the same, and is deprecated.
    """
    return tensorstore_utils.build_array_read_spec(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        raise_array_data_missing_error=info.raise_array_data_missing_error,
    ).json


async def write_shardings(infos: Sequence[type_handlers.ParamInfo]) -> None:
    """Notes a sharding of arrays, those of keys included, that every reader of the checkpoint has.

    Without one, ``StandardCheckpointer().restore(path)`` fails: "Sharding of jax.Array cannot be None".
    """
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    await jax_array_handlers._async_serialize_shardings([here] * len(infos), infos, primary_host=0)


def process_directory(writer: str) -> str:
    """The name of the directory of what a process has written."""
    return f"{tensorstore_utils.PROCESS_SUBDIR_PREFIX}{writer}"
