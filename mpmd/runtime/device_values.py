"""Values of the host on the devices of a process, and values of the devices that it can read."""

from __future__ import annotations

import jax
import numpy as np

from mpmd.runtime.requests import HostSlices


def put(array: np.ndarray | HostSlices, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array on the devices; each of several processes has at least the shards of its devices."""
    if isinstance(array, np.ndarray) and sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    # device_put would compare the arrays of all processes, which takes much longer than the copy.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index or ()])


def is_readable(sharding: jax.sharding.Sharding) -> bool:
    """Whether this process has all shards of an array."""
    return sharding.is_fully_addressable or sharding.is_fully_replicated
