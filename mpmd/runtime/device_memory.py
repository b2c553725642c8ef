"""The memory of devices and of their process: how much there is, and how much is in use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax


class MemoryUse(NamedTuple):
    """The memory in use at the end of a step, in bytes.

    Attributes:
      host: bytes of the process in the memory of its machine.
      device: bytes allocated on the fullest device of the group; ``None`` where JAX does not count them, as
        on CPUs, whose arrays are in ``host``.
      device_peak: the most bytes ever allocated on one device of the group; ``None`` as ``device``.
    """

    host: int
    device: int | None
    device_peak: int | None

    def __or__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(*(_largest(pair) for pair in zip(self, other, strict=True)))  # type: ignore[arg-type]


def memory_use(devices: Sequence[jax.Device]) -> MemoryUse:
    stats = [device.memory_stats() or {} for device in devices]
    return MemoryUse(
        host=_resident_bytes(),
        device=_largest(counted.get("bytes_in_use") for counted in stats),
        device_peak=_largest(counted.get("peak_bytes_in_use") for counted in stats),
    )


def _resident_bytes() -> int:
    """The memory of this process; where the kernel does not say it, the most that it has had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _largest(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def memory_limit(devices: Sequence[jax.Device]) -> int:
    """The bytes that each of this process's devices has: of its allocator, or its share of the host's."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return min((device.memory_stats() or {}).get("bytes_limit", host) for device in devices)
