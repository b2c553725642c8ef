"""The cost of snapshots and of repeated steps to a training loop, and the time of a recovery.

Thirty steps and the values of their losses in the end, in turns: without recovery, with a log alone, with a
snapshot every 10 steps, for which steps wait until groups have answered all, and with a repetition
every 10 and every 30 steps, in which digests of all results are compared. Then a group is killed, and a new
process takes its place, or a spare. Steps that run again depend on when it is killed, and are left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import jax

import cluster
import mpmd
from benchmarks import chain
from benchmarks.frame import Rows, Setup, interleaved, ratio, resident_bytes, scaled, seconds_of

EVERY = 10
BLOCKS = 3
"""Blocks of ten steps in one measurement, so that each measurement has equally many repeated steps."""

REPETITIONS = 5
GROUPS, MICROBATCHES = 2, 4
SIZES = ((400, 2, 64), (1632, 2, 16), (2368, 4, 4))
"""Width, layers of a stage and rows of a microbatch: about 4, 64 and 256 MB of state for each group."""

WITHOUT = "without"
WAYS = {
    WITHOUT: None,
    "a log": cluster.Recovery(every=1000),
    "snapshots": cluster.Recovery(every=EVERY),
    "repeated every 10": cluster.Recovery(every=EVERY, verify_every=10),
    "repeated every 30": cluster.Recovery(every=EVERY, verify_every=30),
}


def run(setup: Setup) -> Rows:
    for size in setup.cases(SIZES, SIZES[:1] if setup.options.device else SIZES[:2]):
        with contextlib.ExitStack() as meshes:
            loops = {
                name: meshes.enter_context(training(setup, size, recovery)) for name, recovery in WAYS.items()
            }
            times = interleaved(
                {name: functools.partial(seconds_of, loop.blocks) for name, loop in loops.items()},
                REPETITIONS,
            )
            state = f"{loops[WITHOUT].nbytes / GROUPS / 1e6:.0f} MB"
            for name, loop in loops.items():
                yield (
                    "Snapshots and repeated steps",
                    {
                        "state of a group": state,
                        "": name,
                        "ms of a step": scaled(times[name], 1e3 / EVERY / BLOCKS),
                        "of a step without": ratio(times[name], times[WITHOUT]),
                        "MB of a process": resident_bytes(loop.mesh.groups[0].pid) / 1e6,
                    },
                )
            new = loops["snapshots"].seconds_of_recovery()
            _check_losses(loops["snapshots"], loops[WITHOUT])
        with training(setup, size, cluster.Recovery(every=EVERY, spares=1)) as loop:
            loop.blocks(1)
            spare = loop.seconds_of_recovery()
        for name, phases in (("a new process", new), ("a spare", spare)):
            seconds = sum(phases.values()) - phases["replayed"]
            cells = {"state of a group": state, "": name, "s until steps run again": seconds}
            yield "Recovery", cells | phases


def _check_losses(killed: Training, undisturbed: Training) -> None:
    while len(undisturbed.losses) < len(killed.losses):
        undisturbed.blocks(1)
    if killed.losses != undisturbed.losses[: len(killed.losses)]:
        raise RuntimeError(f"after a recovery the losses are {killed.losses}, not {undisturbed.losses}")


@contextlib.contextmanager
def training(
    setup: Setup, size: tuple[int, int, int], recovery: cluster.Recovery | None
) -> Iterator[Training]:
    """A training loop on a mesh of its own, after the first steps."""
    with setup.launch({"stage": GROUPS}, "stage", recovery=recovery, cpus_per_group=0.1) as mesh:
        yield Training(mesh, *size)


class Training:
    """Runs blocks of ten steps.

    Attributes:
      mesh: runs the steps.
      nbytes: bytes of the state.
      losses: the last loss of each block.
    """

    def __init__(self, mesh: cluster.ClusterMesh, width: int, layers: int, rows: int):
        self.mesh = mesh
        self._state = chain.initial_state(GROUPS * layers, width)
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        self._batch = chain.batch(MICROBATCHES, rows, width)
        self._step = mpmd.jit(chain.train_step(GROUPS, layers), mesh, donate_argnums=0)
        self.losses: list[float] = []
        self._one()  # compiles; with recovery it is followed by the first snapshot
        self.blocks(1)

    def _one(self) -> Any:
        self._state, loss = self._step(self._state, *self._batch)
        return loss

    def blocks(self, number: int = BLOCKS) -> None:
        """Runs ten steps for each block, which with recovery have one snapshot."""
        losses = [self._one() for _ in range(number * EVERY)]
        self.losses += map(float, losses[EVERY - 1 :: EVERY])

    def seconds_of_recovery(self) -> dict[str, float]:
        """Kills a group, goes on, and returns the seconds of each phase of the recovery."""
        os.kill(self.mesh.groups[1].pid, signal.SIGKILL)
        while not self.mesh.recoveries:
            self.blocks(1)
        return dict(self.mesh.recoveries[-1].seconds)
