"""Values of the host on the devices of a process, and values of the devices that it can read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from mpmd.ir.reshard import Box, box_of, intersection, within


@dataclasses.dataclass(frozen=True)
class HostSlices:
    """The slices of a host array that the driver sends to one of several processes of a group, for its
    devices.

    Indexing by the shard of a device works as for the whole array.
    """

    shape: tuple[int, ...]
    slices: Mapping[Box, np.ndarray]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        asked = box_of(index, self.shape)
        for box, piece in self.slices.items():
            if intersection(box, asked) == asked:
                return piece[within(asked, box)]
        raise AssertionError(f"{asked} was not sent, but {', '.join(map(str, self.slices))}")


def put(array: np.ndarray | HostSlices, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array on the devices; each of several processes has at least the shards of its devices."""
    if isinstance(array, np.ndarray) and sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    # device_put would compare the arrays of all processes, which takes much longer than the copy.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index or ()])


def is_readable(sharding: jax.sharding.Sharding) -> bool:
    return sharding.is_fully_addressable or sharding.is_fully_replicated
