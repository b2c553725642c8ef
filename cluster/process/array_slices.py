"""Slices of arrays as they travel between processes, and arrays that are put together from slices.

Arrays in the host's memory are cut and put together there, by numpy; arrays on an accelerator stay on it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.ir.plan import Aval
from mpmd.ir.reshard import Box, box_of, intersection, volume, within
from mpmd.runtime.transport import Array


def slice_of(array: Array, box: Box) -> Array:
    """A slice of an array; a view where one of this process's devices, of the host, has all of the slice."""
    if isinstance(array, np.ndarray):
        return _slice(box, array.dtype, {tuple((0, size) for size in array.shape): array})
    shards = array.addressable_shards
    slices = {box_of(shard.index, array.shape): _viewed(shard.data) for shard in shards}
    return _slice(box, array.dtype, slices)


def assemble(aval: Aval, sharding: jax.sharding.Sharding, slices: Mapping[Box, Array]) -> jax.Array:
    indices = sharding.addressable_devices_indices_map(aval.shape)
    boxes = {device: box_of(index or (), aval.shape) for device, index in indices.items()}
    by_box = {box: _slice(box, np.dtype(aval.dtype), slices) for box in dict.fromkeys(boxes.values())}
    shards = [jax.device_put(by_box[box], device) for device, box in boxes.items()]
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, shards)


def is_on_host(array: Array) -> bool:
    return isinstance(array, np.ndarray) or next(iter(array.devices())).platform == "cpu"


def _viewed(array: Array) -> Array:
    return np.asarray(array) if is_on_host(array) else array


def _slice(box: Box, dtype: np.dtype, slices: Mapping[Box, Array]) -> Array:
    for held, array in slices.items():
        if held == box:
            return array
        if intersection(held, box) == box:
            return _viewed(array)[within(box, held)]
    needed = {held: array for held, array in slices.items() if intersection(held, box) is not None}
    for array in needed.values():
        if isinstance(array, jax.Array) and not is_on_host(array):
            arrays = jax.device_put(list(needed.values()), array.sharding)
            return put_together_on_device(arrays, box, tuple(needed))
    return _put_together(box, dtype, needed)


def _put_together(box: Box, dtype: np.dtype, slices: Mapping[Box, Array]) -> np.ndarray:
    whole = np.empty([stop - start for start, stop in box], dtype)
    filled = 0
    for held, array in slices.items():
        common = intersection(held, box)
        assert common is not None, f"{held} has nothing of {box}"
        whole[within(common, box)] = np.asarray(array)[within(common, held)]
        filled += volume(common)
    assert filled == whole.size, f"{filled} of the {whole.size} elements of {box} are there"
    return whole


@functools.partial(jax.jit, static_argnames=("box", "held"))
def put_together_on_device(arrays: Sequence[jax.Array], box: Box, held: tuple[Box, ...]) -> jax.Array:
    """JAX compiles this once for each list of boxes; ``held`` has the box of each array."""
    whole = jnp.empty([stop - start for start, stop in box], arrays[0].dtype)
    for array, held_box in zip(arrays, held, strict=True):
        common = intersection(held_box, box)
        assert common is not None, f"{held_box} has nothing of {box}"
        starts = [start - first for (start, _), (first, _) in zip(common, box, strict=True)]
        whole = jax.lax.dynamic_update_slice(whole, array[within(common, held_box)], starts)
    return whole
