"""Messages between groups of several processes, or of different shapes: each process sends what it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cluster.agreement import Agreement
from cluster.endpoint import Endpoint
from mpmd.errors import StepAborted
from mpmd.ir import Aval
from mpmd.reshard import Box, intersection, volume, within
from mpmd.routes import Route
from mpmd.runtime.transport import Array, MessageId, Transport


class SliceTransport(Transport):
    """Implements ``Transport`` for one program and one process of a group, by messages between processes.

    Args:
      transport: between processes; its messages name processes in place of groups.
      endpoint: this process.
      agreement: that of this process's group.
      routes: how each message of the group travels.
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: Endpoint,
        agreement: Agreement,
        routes: Mapping[tuple[int, int, int], Route],
    ):
        self._transport = transport
        self._endpoint = endpoint
        self._agreement = agreement
        here, rank = endpoint.mpmd_idx, endpoint.rank
        self._sent = {key: route.sent_by(rank) for key, route in routes.items() if key[0] == here}
        self._received = {
            key: (route.avals, route.received_by(rank)) for key, route in routes.items() if key[1] == here
        }
        self._device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        for process, parts in self._sent[message[1:]].items():
            dst = self._endpoint.number_of(message.dst, process)
            between = MessageId(message.step, self._endpoint.number, dst, message.tag)
            try:
                self._transport.send(between, [part_of(arrays[part.value], part.box) for part in parts])
            except StepAborted:
                # Nobody waits for the message any more. The group leaves the step where it next agrees.
                return

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        avals, by_process = self._received[message[1:]]
        parts: list[dict[Box, Array]] = [{} for _ in avals]
        reason = None
        try:
            for process, expected in by_process.items():
                src = self._endpoint.number_of(message.src, process)
                between = MessageId(message.step, src, self._endpoint.number, message.tag)
                arrays = self._transport.recv(between, [self._device] * len(expected))
                for part, array in zip(expected, arrays, strict=True):
                    parts[part.value][part.box] = array
        except StepAborted as aborted:
            reason = str(aborted)
        self._agreement.agree(message.step, reason)
        return [assemble(*value) for value in zip(avals, shardings, parts, strict=True)]

    def abort(self, step: int, reason: str) -> None:
        self._transport.abort(step, reason)

    def close(self) -> None:
        self._transport.close()


def part_of(array: Array, box: Box) -> Array:
    """A part of an array; a view where one of this process's devices has all of the part."""
    whole = tuple((0, size) for size in array.shape)
    if isinstance(array, np.ndarray):
        return _cut(array, box, whole)
    shards = [(_box(shard.index, array.shape), shard.data) for shard in array.addressable_shards]
    for held, data in shards:
        if intersection(held, box) == box:
            on_host = np.asarray(data) if _in_host_memory(data) else data
            return _cut(on_host, box, held)
    return _put_together(box, array.dtype, dict(shards))


def assemble(aval: Aval, sharding: jax.sharding.Sharding, parts: Mapping[Box, Array]) -> jax.Array:
    """The array of which this process has got the parts that its devices hold."""
    indices = sharding.addressable_devices_indices_map(aval.shape)
    boxes = {device: _box(index or (), aval.shape) for device, index in indices.items()}
    found = {box: _gathered(box, aval, parts) for box in dict.fromkeys(boxes.values())}
    shards = [jax.device_put(found[box], device) for device, box in boxes.items()]
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, shards)


def _gathered(box: Box, aval: Aval, parts: Mapping[Box, Array]) -> Array:
    for held, array in parts.items():
        if intersection(held, box) == box:
            return array if held == box else _cut(np.asarray(array), box, held)
    return _put_together(box, np.dtype(aval.dtype), parts)


def _put_together(box: Box, dtype: np.dtype, parts: Mapping[Box, Array]) -> np.ndarray:
    """What different parts have in common with a box, which is all of it, in the host's memory."""
    whole = np.empty([stop - start for start, stop in box], dtype)
    filled = 0
    for held, array in parts.items():
        if (common := intersection(held, box)) is not None:
            whole[within(common, box)] = np.asarray(array)[within(common, held)]
            filled += volume(common)
    assert filled == whole.size, f"{filled} of the {whole.size} elements of {box} are there"
    return whole


def _cut(array: Array, box: Box, held: Box) -> Array:
    """A part of an array that has the elements of the box ``held``."""
    index: tuple[Any, ...] = (*within(box, held), ...)  # "..." makes the part of a scalar an array, too
    return array[index]


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _in_host_memory(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"
