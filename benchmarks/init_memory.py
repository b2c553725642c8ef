"""The memory of the driver and of the groups that making the state of a train step takes.

Run ``python -m benchmarks.init_memory --megabytes 1024``: parameters of this size, with the two moments of
Adam, are made by ``step.init`` on four Ray actors, and by ``jax.jit`` in one process for comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ray

import cluster
import mpmd
from benchmarks.chain import OPTIMIZER, train_step
from benchmarks.host import Host
from benchmarks.peers import cpu_environment

GROUPS, LAYERS_EACH = 4, 2


def width_for(megabytes: int) -> int:
    """The width of square weights of this size in all."""
    return int((megabytes * 2**20 / 4 / (GROUPS * LAYERS_EACH)) ** 0.5)


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The most memory that processes had, in MiB: the driver before and after ``init``, and each group."""

    before: int
    after: int
    groups: tuple[int, ...]
    seconds: float

    @property
    def grown(self) -> int:
        return self.after - self.before


class Maker:
    """Makes a state; made in a process of its own, by ``Host``, because a process has one peak."""

    def __init__(self, width: int):
        self._width = width

    def _init(self, key):
        keys = jax.random.split(key, GROUPS * LAYERS_EACH)
        scale = self._width**-0.5
        params = [jax.random.normal(key, (self._width, self._width)) * scale for key in keys]
        return params, OPTIMIZER.init(params)

    def on_groups(self) -> Peaks:
        """By ``step.init``, on Ray actors."""
        ray.init(address="local", num_cpus=GROUPS, include_dashboard=False, object_store_memory=200 * 2**20)
        key = jax.random.key(0)
        with cluster.launch({"stage": GROUPS}, "stage", cpus_per_group=1) as mesh:
            xs = jax.ShapeDtypeStruct((GROUPS, 1, self._width), jnp.float32)
            shapes = jax.eval_shape(self._init, key)
            step = mpmd.jit(train_step(GROUPS, LAYERS_EACH), mesh, donate_argnums=0).compile(shapes, xs, xs)
            before, start = _peak("self"), time.perf_counter()
            jax.block_until_ready(step.init(self._init, key))
            seconds = time.perf_counter() - start
            return Peaks(before, _peak("self"), tuple(_peak(group.pid) for group in mesh.groups), seconds)

    def in_one_process(self) -> Peaks:
        """By ``jax.jit``."""
        before, start = _peak("self"), time.perf_counter()
        jax.block_until_ready(jax.jit(self._init)(jax.random.key(0)))
        return Peaks(before, _peak("self"), (), time.perf_counter() - start)

    def close(self) -> None:
        """Ends Ray, if it was started."""
        ray.shutdown()


def _peak(pid: int | str) -> int:
    """The most memory that a process of this machine has had, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def measure(megabytes: int, how: str) -> Peaks:
    """The peaks of a state with parameters of so many MiB; ``how`` is a method of ``Maker``."""
    host = Host("benchmarks.init_memory:Maker", (width_for(megabytes),), cpu_environment(1, 2))
    try:
        host.ready()
        return host.call(how)
    finally:
        host.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the parameters, in all")
    megabytes = parser.parse_args().megabytes
    print(f"{megabytes} MiB of parameters, {3 * megabytes} MiB with Adam, {GROUPS} groups")
    for name, how in (("step.init", "on_groups"), ("jax.jit", "in_one_process")):
        peaks = measure(megabytes, how)
        print(
            f"{name}: the driver's peak was {peaks.before} MiB before and {peaks.after} MiB after, "
            f"{peaks.seconds:.1f} s; peaks of the groups in MiB: {peaks.groups or 'none'}"
        )


if __name__ == "__main__":
    main()
