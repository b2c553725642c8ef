"""The sections of transports: the rates of messages between two processes that have devices."""

from __future__ import annotations

import statistics

from benchmarks.device.groups import local_ray
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Table
from benchmarks.transport import KIB, MIB, connected, in_a_step, size_text
from cluster.start.environment import gpu_memory

SIZES, QUICK_SIZES = (64 * KIB, MIB, 16 * MIB, 128 * MIB), (64 * KIB, MIB)
BYTES, REPETITIONS = 512 * MIB, 3


def run(settings: Settings, transport: str) -> Findings:
    """Round trips and streams of arrays of the device by one transport."""
    gpus = settings.gpus_of(2)
    environment = settings.environment() | (gpu_memory({}, gpus, shares=False) if settings.is_gpu else {})
    seconds = {}
    with local_ray(settings), connected(MIB, environment, {transport: transport}, gpus) as ends:
        for size in QUICK_SIZES if settings.quick else SIZES:
            count = max(4, min(50, BYTES // size))
            for kind in ("round_trip", "stream"):
                times = [in_a_step(ends, kind, transport, size, count) for _ in range(REPETITIONS + 1)]
                seconds[kind, size] = statistics.median(times[1:])
    sizes = sorted({size for _, size in seconds})
    rows = [row_of(size, seconds["round_trip", size], seconds["stream", size]) for size in sizes]
    header = ("message", "us, there and back", "us in a stream", "GB/s in a stream")
    data = [{"kind": kind, "bytes": size, "seconds": taken} for (kind, size), taken in seconds.items()]
    return Findings((Table(f"Messages by {transport}", header, tuple(rows)),), data)


def row_of(size: int, round_trip: float, stream: float) -> tuple[str, ...]:
    """A row for messages of so many bytes."""
    return size_text(size), f"{round_trip * 1e6:.0f}", f"{stream * 1e6:.0f}", f"{size / stream / 1e9:.2f}"
