"""The memory of devices: how much each has, and the most that was allocated."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax


def memory_limit(devices: Sequence[jax.Device]) -> int:
    """The bytes that each of this process's devices has: of its allocator, or its share of the host's."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return min((device.memory_stats() or {}).get("bytes_limit", host) for device in devices)


def measured_peak(devices: Sequence[jax.Device]) -> int | None:
    """The most bytes that were ever allocated on one of the devices; ``None`` where JAX does not count."""
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [counted["peak_bytes_in_use"] for counted in stats if "peak_bytes_in_use" in counted]
    return max(peaks, default=None)
