"""The record of one process's times in a step, as they come."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import platform
import time
from collections.abc import Sequence

import jax

from mpmd.ir.process_times import Host, ProcessTimes, SendTime, TaskTime, WaitTime


@functools.cache
def host_here() -> Host:
    """The node, the clock and the cores of this process. Processes that share a kernel share its clock."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    name = platform.node()
    clock = boot.read_text().strip() if boot.exists() else name
    if (namespace := pathlib.Path("/proc/self/ns/time")).exists():
        clock += f" {os.readlink(namespace)}"  # a container may have a monotonic clock of its own
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return Host(name, clock, cores)


@dataclasses.dataclass(slots=True)
class Recording:
    """The times so far, in nanoseconds of ``time.perf_counter_ns``.

    Attributes:
      received: when the process turned to the request.
      on_cores: whether tasks run on the cores of the host.
      has_processor_time: whether the processor time of this process counts only the group's tasks.
        With an accelerator it does not: the accelerator computes while the processor waits.
    """

    received: int
    on_cores: bool = False
    has_processor_time: bool = False
    tasks: list[TaskTime] = dataclasses.field(default_factory=list)
    waits: list[WaitTime] = dataclasses.field(default_factory=list)
    sends: list[SendTime] = dataclasses.field(default_factory=list)
    ready: int = 0
    finished: int = 0

    def mark_ready(self, inputs: Sequence[jax.Array]) -> None:
        jax.block_until_ready(inputs)
        self.ready = time.perf_counter_ns()

    def processor_time(self) -> int | None:
        return time.process_time_ns() if self.has_processor_time else None

    def times(self, mpmd_idx: int, rank: int) -> ProcessTimes:
        return ProcessTimes(
            mpmd_idx=mpmd_idx,
            rank=rank,
            host=host_here(),
            received=self.received,
            ready=self.ready,
            finished=self.finished,
            replied=time.perf_counter_ns(),
            tasks=tuple(self.tasks),
            waits=tuple(self.waits),
            sends=tuple(self.sends),
            on_cores=self.on_cores,
        )
