"""The planner: seconds of its searches, and its predictions and choices beside measured steps.

Each model's step leaves all open: layers, stages, groups, schedule and microbatches. ``mpmd.plan`` chooses by
simulation, and with measured tasks; the best rows of both tables and plans by hand then run in turns. Times
are those of several steps in a row. ``tasks of the run`` simulates with the times that tasks took in the
steps: what is off there is the simulator's. Tasks that sleep take an exact time.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.frame import Rows, Setup
from benchmarks.host import Host
from benchmarks.planned_models import MODELS
from mpmd.planner.constraints import Constraints
from mpmd.planner.search.search import search
from tests.support.profiles import a100s, gpt

SEARCHES = ((24, 2048, 1), (48, 6144, 8), (96, 12288, 16), (96, 12288, 64), (96, 12288, 128))
"""Layers and width of a GPT, and nodes of eight A100."""

KEEPING = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
"""Variables with which glibc keeps freed memory of any size.

Otherwise arrays of 32 MiB and more are in new memory each time. Its pages take long to get, and how long
depends on what the machine has done before.
"""

TURNS = 2
"""A factor of the repetitions: the best of a dozen ways is by chance the better, the fewer measurements."""


class Where(NamedTuple):
    """The groups, and whether they are on Ray."""

    groups: int
    on_ray: bool

    def __str__(self) -> str:
        return f"{self.groups} groups {'on Ray' if self.on_ray else 'in process'}"


PLACES = tuple(Where(groups, on_ray) for on_ray in (True, False) for groups in (2, 4))
STEPS = tuple(
    (where, model) for where in PLACES for model in MODELS if model == "chain" or where == (2, False)
)
"""The groups, and the model whose step is chosen, predicted and run on them."""

SLEEPING = (Where(2, False), Where(4, True))


def run(setup: Setup) -> Rows:
    yield from searches(setup)
    cases = setup.cases(STEPS, [(PLACES[2], "chain")])
    for where in dict.fromkeys(where for where, _ in cases):
        with groups_at(where, setup) as host:
            yield "Calibrated devices", {"": str(where), **host.call("calibrated")}
            for model in (model for place, model in cases if place == where):
                for row in host.call("ways", model, setup.quick, TURNS * setup.repetitions):
                    yield "Steps", {"model": model, "groups": str(where), **row}
    for where in SLEEPING:
        sleeps = (1.0, 1.5, 1.0, 2.0)[: where.groups]
        with groups_at(where, setup, sleeps=sleeps) as host:
            for row in host.call("sleeping", sleeps):
                yield "Tasks that sleep, uneven stages", {"groups": str(where), **row}


def searches(setup: Setup) -> Rows:
    """Seconds of processor time on one core, and the most memory that the process has had so far."""
    for layers, width, nodes in setup.cases(SEARCHES, SEARCHES[:1]):
        profile, cluster = gpt(num_layers=layers, width=width, heads=width // 128), a100s(nodes)
        start = time.process_time()
        best, *_ = search(profile, cluster, Constraints())
        yield (
            "Searches",
            {
                "": f"{layers} layers, {8 * nodes} devices",
                "s of processor time": time.process_time() - start,
                "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "predicted step, s": best.prediction.seconds,
            },
        )


@contextlib.contextmanager
def groups_at(where: Where, setup: Setup, sleeps: Sequence[float] = ()) -> Iterator[Host]:
    """Opens groups of one device each, from a process of their own.

    That process has as many devices as all groups, on which tasks are measured. It has the threads of all
    groups in process; for groups on Ray it has as many as each group, since a task there has no more.
    Groups in process keep the memory that they free.
    """
    if where.on_ray:
        setup.join_ray()
    threads = max(1, setup.cores // where.groups) if where.on_ray else setup.cores
    environment = setup.environment(where.groups, threads) | ({} if where.on_ray else KEEPING)
    arguments = (where.groups, setup if where.on_ray else None, sleeps)
    with Host("benchmarks.planned_groups:Groups", arguments, environment) as host:
        yield host
