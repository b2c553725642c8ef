"""The frame of all benchmarks: the machine that they may use, repeated measurements, and meshes of groups.

A benchmark is a module with a function ``run`` of a ``Setup``. It measures one case after another, and yields
the title of a table with a row of it for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import cluster
    import mpmd

Case = TypeVar("Case")
Times = tuple[float, ...]
"""Measured values, one for each repetition."""

SECONDS_IN_A_ROW = 0.4
"""The seconds of the steps in a row that one measurement takes, roughly."""

START_SECONDS = 240.0
"""The seconds that actors may take to start on a busy machine."""

OBJECT_STORE_BYTES = 2**30
LEAST_CPUS = 4


@dataclasses.dataclass(frozen=True)
class Limited:
    """A measured value with the limit that it should keep: at most ``limit``, or at least."""

    value: float
    limit: float
    at_least: bool = False

    @property
    def kept(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


Cell = str | int | float | Sequence[float] | Limited
Row = Mapping[str, Cell]
"""Cells by the names of their columns, which say the unit."""

Rows = Iterator[tuple[str, Row]]


@dataclasses.dataclass(frozen=True)
class Setup:
    """The machine and the options of a run.

    Attributes:
      options: the command line, as parsed.
      cores: the cores that a benchmark may use in all.
      platform: JAX's name of the devices, such as ``cuda``.
      kind: JAX's name of a device, such as ``NVIDIA H100``.
      devices: the number of accelerators; a process on CPUs asks for as many devices as it needs.
    """

    options: argparse.Namespace
    cores: int
    platform: str = "cpu"
    kind: str = "cpu"
    devices: int = 8

    @property
    def quick(self) -> bool:
        return self.options.quick

    @property
    def repetitions(self) -> int:
        return 3 if self.quick else 5

    def steps(self, seconds_per_step: float) -> int:
        """The number of steps in a row that one measurement takes, 2 to 1,000."""
        return min(max(2, round(SECONDS_IN_A_ROW / seconds_per_step)), 1000)

    def cases(self, cases: Sequence[Case], quick: Sequence[Case]) -> Sequence[Case]:
        """The cases to run: with ``--quick`` the short list."""
        return quick if self.quick else cases

    @property
    def has_gpus(self) -> bool:
        return self.platform in ("cuda", "rocm")

    def environment(self, devices: int, threads: int) -> dict[str, str]:
        """Variables of a process with this number of CPU devices, or with the accelerators."""
        from cluster.start.environment import PREALLOCATE, actor_environment  # most hosts need no cluster

        if self.platform == "cpu":
            variables = actor_environment({}, "", "cpu", devices, threads)
            return {**variables, "OMP_NUM_THREADS": str(threads)}
        variables = {"JAX_PLATFORMS": f"{self.platform},cpu"}
        return variables | ({PREALLOCATE: "false"} if self.has_gpus else {})

    @functools.cached_property
    def ray_address(self) -> str:
        """The address of a Ray of this run, which the first use starts."""
        import ray

        started: Any = ray.init(
            address="local",
            num_cpus=max(self.cores, LEAST_CPUS),
            num_gpus=self.devices if self.has_gpus else None,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        return started.address_info["gcs_address"]

    def join_ray(self, **options: Any) -> None:
        """Connects this process to the Ray of this run; ``options`` go to ``ray.init``."""
        import ray

        address = self.ray_address
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, **options)

    @property
    def gpus_per_group(self) -> float | None:
        """A GPU for each of up to four groups, or a quarter where there are fewer GPUs."""
        return (1 if self.devices >= 4 else 0.25) if self.has_gpus else None

    def launch(self, *shape: Any, **options: Any) -> cluster.ClusterMesh:
        """``cluster.launch`` on the devices and the Ray of this run."""
        import cluster

        self.join_ray()
        usual = {"platform": self.platform, "gpus_per_group": self.gpus_per_group, "timeout": START_SECONDS}
        return cluster.launch(*shape, **usual | options)


def in_process_mesh(groups: int, **axes: int) -> mpmd.MpmdMesh:
    """Groups of this process's devices; ``axes`` has the sizes of each submesh's axes."""
    import jax
    import numpy as np

    import mpmd

    shape = (groups, *axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage", *axes)), "stage")


def interleaved(things: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, Times]:
    """Measures everything once, then again, each time beginning with another thing.

    So a disturbance of the machine hits all alike. ``things`` return their measured values.
    """
    measured: dict[str, list[float]] = {name: [] for name in things}
    names = list(things)
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(things[name]())
    return {name: tuple(times) for name, times in measured.items()}


def ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    """The median over repetitions of ``times / baseline`` within each repetition."""
    return statistics.median(a / b for a, b in zip(times, baseline, strict=True))


def scaled(times: Sequence[float], factor: float) -> Times:
    """Measured values in another unit, such as ``1e3`` for milliseconds from seconds."""
    return tuple(factor * time for time in times)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident_bytes(pid: int) -> int:
    """The memory of a process of this machine."""
    with open(f"/proc/{pid}/status") as file:
        return 1024 * int(file.read().partition("VmRSS:")[2].split()[0])
