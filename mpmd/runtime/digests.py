"""Digests of values, to compare bit by bit values that were computed twice or that several devices hold.

A digest is XXH3 of 64 bits, which misses one change in 2^64, and is faster than a copy of the memory.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jaxlib
import numpy as np
import xxhash

from mpmd.ir.reshard import Box, box_of
from mpmd.runtime.lost_values import LostValue

HOST = "the host"
"""The device of a value that is in the host's memory."""


class DigestedMessage(NamedTuple):
    """A message that a process has received or sent in a step.

    Attributes:
      peer: the other group.
      digests: of its values, by device.
    """

    is_received: bool
    tag: int
    peer: int
    digests: Mapping[str, int]


DigestedMessages = Mapping[int, tuple[DigestedMessage, ...]]
"""The messages of a group's processes in a step, in the order of the program, by the rank of the process."""


class ShardDigest(NamedTuple):
    device: str
    box: Box
    digest: int


class ValueDigest(NamedTuple):
    """The digests of a value, and its type as text.

    Attributes:
      is_received: whether the group has it from another one or from the driver, bit by bit, and has not
        computed it.
    """

    type: str
    shards: tuple[ShardDigest, ...]
    is_received: bool


@dataclasses.dataclass(frozen=True)
class ProcessDigests:
    """Digests of all values that live in a process between two steps.

    Attributes:
      place: the node and the process, as text.
      kind: the properties of the process, such as processor and versions, that affect the bits it computes.
      values: digests by handle, without lost values.
    """

    mpmd_idx: int
    rank: int
    place: str
    kind: tuple[str, ...]
    values: Mapping[int, ValueDigest]


def process_digests(
    mpmd_idx: int,
    rank: int,
    devices: Sequence[jax.Device],
    values: Mapping[int, jax.Array | LostValue],
    received: Container[int],
) -> ProcessDigests:
    digests = {
        handle: ValueDigest(
            f"{value.dtype}[{','.join(map(str, value.shape))}]",
            tuple(
                ShardDigest(str(shard.device), box_of(shard.index, value.shape), _digest_of(shard.data))
                for shard in value.addressable_shards
            ),
            handle in received,
        )
        for handle, value in values.items()
        if not isinstance(value, LostValue)
    }
    place = f"process {os.getpid()} on {platform.node()}"
    return ProcessDigests(mpmd_idx, rank, place, _computing_kind(devices), digests)


def digests_by_device(values: Sequence[jax.Array | np.ndarray]) -> dict[str, int]:
    """For each device of this process, the digest of all that it has of the values."""
    states: dict[str, xxhash.xxh3_64] = {}
    for value in values:
        for device, data in _pieces(value):
            states.setdefault(device, xxhash.xxh3_64()).update(data.data)
    return {device: state.intdigest() for device, state in states.items()}


_PROCESSOR_LINES = (
    "model name",
    "flags",
    *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),  # of ARM
)
"""The beginnings of lines of ``/proc/cpuinfo`` that tell the model of a processor."""


def _computing_kind(devices: Sequence[jax.Device]) -> tuple[str, ...]:
    """The processors, threads, devices, flags and versions with which a process computes.

    The bits of a sum depend on the number of threads, and the bits of functions such as ``exp`` on the
    instructions of the processor. So processes of different kinds may rightly compute different bits.
    """
    return (
        *sorted({device.device_kind for device in devices}),
        _processor(),
        os.environ.get("NPROC", ""),
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("JAX_NUM_CPU_DEVICES", ""),
        jax.__version__,
        jaxlib.__version__,
    )


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = "; ".join(dict.fromkeys(line for line in lines if line.startswith(_PROCESSOR_LINES)))
    return told or platform.processor() or platform.machine()


def _pieces(value: jax.Array | np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, np.ndarray):
        yield HOST, bytes_of(value)
        return
    for shard in value.addressable_shards:
        yield str(shard.device), bytes_of(np.asarray(shard.data))


def _digest_of(data: jax.Array) -> int:
    return xxhash.xxh3_64_intdigest(bytes_of(np.asarray(data)).data)


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, as a view if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
