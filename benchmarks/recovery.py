"""The cost of snapshots to a training loop, and the time of a recovery, by the size of the groups' state.

With and without recovery, in turns: ten steps, in which one snapshot is begun, and the value of the last
loss. Then a group is killed, and its place is taken by a process that has to be started, or by a spare. What
the steps that are run again take depends on when it is killed, and is left out.

Also the memory of a group's process after the steps, and what the driver's log has had of batches at most.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import cluster
import mpmd
from benchmarks.chain import OPTIMIZER, train_step
from benchmarks.measure import Conditions, Result, Table, interleaved, ratio, seconds_of
from benchmarks.peers.ours import START_SECONDS
from cluster.recovery.runtime import RecoveringRuntime

EVERY = 10
GROUPS, MICROBATCHES = 2, 4
SIZES = ((400, 2, 64), (1632, 2, 16), (2368, 4, 4))
"""Width and layers of a stage, and rows of a microbatch: about 4, 64 and 256 MB of state for each group."""
QUICK = SIZES[:2]
WITHOUT, WITH = "without", f"every {EVERY}"


def run(conditions: Conditions) -> Result:
    sizes = QUICK if conditions.quick else SIZES
    rows, data = [], []
    for size in sizes:
        with contextlib.ExitStack() as meshes:
            steps = {
                name: meshes.enter_context(training(size, recovery))
                for name, recovery in ((WITHOUT, None), (WITH, cluster.Recovery(every=EVERY)))
            }
            times = interleaved(
                {name: functools.partial(seconds_of, each.block) for name, each in steps.items()},
                max(5, conditions.effort.repetitions),
            )
            memory = {name: each.resident_bytes() for name, each in steps.items()}
            logged = steps[WITH].logged_bytes
            cold = steps[WITH].seconds_of_recovery()
        with training(size, cluster.Recovery(every=EVERY, spares=1)) as step:
            step.block()
            spare = step.seconds_of_recovery()
        megabytes = steps[WITH].nbytes / GROUPS / 1e6
        rows.append(
            (
                f"{megabytes:.0f} MB",
                *(f"{statistics.median(times[name]) / EVERY * 1e3:.1f}" for name in (WITHOUT, WITH)),
                f"{ratio(times[WITH], times[WITHOUT]):.2f}",
                *(f"{sum(found.values()) - found['replayed']:.1f}" for found in (cold, spare)),
                f"{cold['started']:.1f}",
                *(f"{memory[name] / 1e6:.0f}" for name in (WITHOUT, WITH)),
                f"{logged / 1e6:.1f}",
            )
        )
        data.append(
            {
                "bytes": steps[WITH].nbytes,
                "seconds": times,
                "cold": cold,
                "spare": spare,
                "memory": memory,
                "logged": logged,
            }
        )
    header = (
        "state of a group",
        "ms of a step, without",
        WITH,
        "with / without",
        "s until steps run again",
        "with a spare",
        "a new process alone",
        "MB of a process, without",
        WITH,
        "of the driver's log",
    )
    return Result([Table("Recovery", header, tuple(rows))], [], data)


@contextlib.contextmanager
def training(
    size: tuple[int, int, int], recovery: cluster.Recovery | None, **options: Any
) -> Iterator[Training]:
    """A training loop on a mesh of its own, after the first steps; ``options`` are ``launch``'s."""
    options = {"cpus_per_group": 0.1, "timeout": START_SECONDS} | options
    with cluster.launch({"stage": GROUPS}, "stage", recovery=recovery, **options) as mesh:
        yield Training(mesh, size)


class Training:
    """Runs ten steps at a time.

    Attributes:
      mesh: runs the steps.
      nbytes: of the state.
      losses: the last one of each block.
      logged_bytes: the most that the driver's log has had of batches, and with the first step of the state.
    """

    def __init__(self, mesh: cluster.ClusterMesh, size: tuple[int, int, int]):
        width, layers, rows = size
        keys = jax.random.split(jax.random.key(0), GROUPS * layers)
        weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
        self.mesh = mesh
        self._state = (weights, OPTIMIZER.init(weights))
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        self._batch = np.random.default_rng(0).standard_normal((MICROBATCHES, rows, width), np.float32)
        self._step = mpmd.jit(train_step(GROUPS, layers), mesh, donate_argnums=0)
        self.losses: list[float] = []
        self.logged_bytes = 0
        self._one()  # compiles; with recovery it is followed by the first snapshot
        self.block()

    def _one(self) -> Any:
        self._state, loss = self._step(self._state, self._batch, self._batch)
        if isinstance(self.mesh.runtime, RecoveringRuntime):
            self.logged_bytes = max(self.logged_bytes, self.mesh.runtime.logged_bytes)
        return loss

    def block(self) -> None:
        """Ten steps, which with recovery have one snapshot."""
        losses = [self._one() for _ in range(EVERY)]
        self.losses.append(float(losses[-1]))

    def resident_bytes(self) -> int:
        """The memory of a group's process that is in use now."""
        status = Path(f"/proc/{self.mesh.groups[0].pid}/status").read_text()
        return 1024 * int(status.partition("VmRSS:")[2].split()[0])

    def seconds_of_recovery(self) -> dict[str, float]:
        """Kills a group, goes on, and returns how long each phase of the recovery took."""
        os.kill(self.mesh.groups[1].pid, signal.SIGKILL)
        while not self.mesh.recoveries:
            self.block()
        return dict(self.mesh.recoveries[-1].seconds)
