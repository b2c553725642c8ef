"""The groups that predicted steps run on, of one device each, in process and on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.host import Host
from benchmarks.measure import Conditions
from benchmarks.peers import cpu_environment

KEEPING = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
"""Variables with which glibc keeps freed memory of any size.

Otherwise arrays of 32 MiB and more are in new memory each time. Its pages take long to get, and how long
depends on what the machine has done before.
"""


@dataclasses.dataclass(frozen=True)
class Where:
    """The groups, and whether they are on Ray."""

    groups: int
    on_ray: bool

    def __str__(self) -> str:
        return f"{self.groups} groups {'on Ray' if self.on_ray else 'in process'}"


def places_of(conditions: Conditions) -> list[Where]:
    """The groups to run on, on Ray and in process."""
    if conditions.quick:
        return [Where(2, True), Where(4, False)]
    return [Where(groups, on_ray) for on_ray in (True, False) for groups in (2, 4)]


@contextlib.contextmanager
def groups_at(
    where: Where, conditions: Conditions, sleeps: Sequence[float] = (), gives_back: bool = False
) -> Iterator[Host]:
    """Opens groups of one device each, in a process of their own.

    That process has as many devices as all groups, on which tasks are measured. It has the threads of all
    groups in process; for groups on Ray it has as many as each of them, since a task there has no more.
    Groups in process keep the memory that they free.
    """
    keeping = {} if where.on_ray else KEEPING
    threads = max(1, conditions.cores // where.groups) if where.on_ray else conditions.cores
    environment = {**cpu_environment(where.groups, threads), **keeping}
    address = conditions.ray_address if where.on_ray else ""
    arguments = (where.groups, address, sleeps, gives_back)
    with contextlib.closing(Host("benchmarks.predicted_steps:Groups", arguments, environment)) as host:
        host.ready()
        yield host
