"""Has a mesh run many steps and load many programs, and compares what its processes hold before and after."""

import collections
import contextlib
import ctypes
import gc
import os
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.models import batch, init, make_step, mse, too_much, weights

STEPS, PROGRAMS = 2000, 500

SLACK = 10
"""By how much of each kind a process may differ: Ray and libc have pools, and the two snapshots that recovery
keeps may share values or not. What each step, failure or program left would be a hundred or more."""

SLACK_BYTES = 8 * 2**20
PROGRAM_BYTES = 48 * 2**10
"""What a program leaves in the driver: entries of JAX's caches, which have at most 2,048 entries each."""


USUAL_THRESHOLDS = gc.get_threshold()
"""When a user's process collects garbage. While tests run, ``conftest.py`` has it collected less often."""


class Held(NamedTuple):
    """What a process holds."""

    arrays: int
    objects: collections.Counter
    descriptors: int
    threads: int
    mappings: int
    resident_bytes: int


def held(*_):
    """What this process holds, without what is garbage. May be called as a task of an actor."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    kinds = (repr(type(thing)) for thing in gc.get_objects())
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    return Held(
        arrays=len(jax.live_arrays()),
        # Those of a traced function, such as the boundaries of stages, are kept by JAX's caches for a while.
        objects=collections.Counter(
            kind
            for kind in kinds
            if kind.startswith(("<class 'mpmd.", "<class 'cluster.")) and not kind.endswith(".Boundary'>")
        ),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        mappings=len(Path("/proc/self/maps").read_text().splitlines()),
        resident_bytes=resident,
    )


@contextlib.contextmanager
def usual_collections():
    """Collects garbage as often as a user's process does: where it stays for long, the heap is scattered."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*USUAL_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def assert_flat(before, after, programs=0):
    """Asserts that processes hold what they have held before."""
    for there, here in zip(before, after, strict=True):
        more = here.objects - there.objects
        counts = f"{there._replace(objects=None)}, then {here._replace(objects=None)}; more objects: {more}"
        assert here.arrays <= there.arrays + SLACK, counts
        assert more.total() <= SLACK, counts
        assert here.descriptors <= there.descriptors + SLACK, counts
        assert here.threads <= there.threads + SLACK, counts
        assert here.mappings <= there.mappings + SLACK, counts
        grown = here.resident_bytes - there.resident_bytes
        assert grown <= SLACK_BYTES + programs * PROGRAM_BYTES, counts


def out_of_memory(params, x, y):
    return mse(params, x, y) + jax.lax.stop_gradient(too_much(x.sum()))


def jitted(mesh, loss=mse, **options):
    return mpmd.jit(make_step(loss, mpmd.Std1F1B(2)), mpmd_mesh=mesh, **options)


class Training:
    """Trains a small model on a mesh, with a step that fails now and then."""

    def __init__(self, mesh):
        self._mesh = mesh
        self._step = jitted(mesh, donate_argnums=0)
        self._failing = jitted(mesh, out_of_memory)
        self._state = init(weights(2))
        self._data = batch()

    def step(self):
        """Trains, and waits for the end of the step."""
        self._state, (loss, _) = self._step(self._state, *self._data)
        assert jnp.isfinite(float(loss))

    def steps(self, count):
        """Trains without waiting, but for each 20th step, which is followed by one that fails."""
        for number in range(count):
            self._state, _ = self._step(self._state, *self._data)
            if number % 20 == 0:
                with pytest.raises(mpmd.TaskError, match="RESOURCE_EXHAUSTED"):
                    float(self._failing(self._state, *self._data)[1][0])
        self.step()

    def programs(self, count):
        """Compiles the step anew, and drops it; every other time after a step with it."""
        for number in range(count):
            step = jitted(self._mesh).compile(self._state, *self._data)
            if number % 2:
                float(step(self._state, *self._data)[1][0])

    @usual_collections()
    def endure(self, measure):
        """Asserts that all is as before after ``STEPS`` steps and ``PROGRAMS`` programs.

        Args:
          measure: gives what each process holds, when nothing is under way.
        """
        # What the first ones make stays: connections, pools, and what JAX has compiled for itself.
        self.steps(21)
        self.programs(4)
        before = self._measured(measure)
        self.steps(STEPS)
        assert_flat(before, self._measured(measure))
        self.programs(PROGRAMS)
        assert_flat(before, self._measured(measure), PROGRAMS)

    def _measured(self, measure):
        gc.collect()
        for _ in range(2):  # by which groups are told what is needed no more
            self.step()
        return measure()
