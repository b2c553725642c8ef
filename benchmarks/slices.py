"""Slices of long sequences: sleeping tasks against the simulator, and a GPT beside other schedules.

The tasks of the first table sleep, a backward twice as long as a forward, so that many groups fit on few
cores; see ``sleeping``. The second table has the small GPT of the examples with long sequences. One loss, a
loop over slices, runs by all schedules on four groups of one process each, in turns. Bytes are those that a
process takes during its first steps on top of those before them, at its worst moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Sequence

import jax
import numpy as np

import cluster
import mpmd
from benchmarks import sleeping
from benchmarks.measure import Conditions, Result, Table, Target, Times, interleaved, ratio, seconds_of
from benchmarks.peers.ours import START_SECONDS
from benchmarks.predicted_steps import peak_resident, resident
from examples import gpt
from mpmd.simulate import Costs, simulate

SLEEPING = ((4, 4, 4), (8, 8, 4), (8, 8, 8), (8, 2, 8), (16, 16, 8))
"""Groups, microbatches and slices."""
QUICK_SLEEPING = SLEEPING[:1]
LIMIT = 1.05
FORWARD_SECONDS, BACKWARD_SECONDS = 0.02, 0.04
GROUPS, SLICES, MICROBATCHES = 4, 4, 4
BASELINE = "Std1F1B"
LEARNING_RATE = 1e-3
FIRST_STEPS = 2
GIVES_BACK = {"env_vars": {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_ARENA_MAX": "1"}}
"""A process gives arrays back to the system as soon as they are freed, so that its peak is what it holds."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the GPT, of one layer on each group."""

    d_model: int = 64
    heads: int = 4
    seq_len: int = 2048

    @property
    def config(self) -> gpt.GPTConfig:
        return gpt.GPTConfig(GROUPS, self.d_model, self.heads, self.seq_len, GROUPS)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The bounds of slices of equal work."""
        attention_share = self.seq_len / (self.seq_len + 12 * self.d_model)
        return mpmd.slice_bounds(self.seq_len, SLICES, attention_share=attention_share)


QUICK_SIZES = Sizes(seq_len=512)


def run(conditions: Conditions) -> Result:
    slept, targets, of_sleeping = _sleep(conditions)
    trained, of_training = _train(QUICK_SIZES if conditions.quick else Sizes(), conditions)
    return Result([slept, trained], targets, {"sleeping": of_sleeping, "gpt": of_training})


def _sleep(conditions: Conditions) -> tuple[Table, list[Target], list[dict]]:
    sizes = QUICK_SLEEPING if conditions.quick else SLEEPING
    cases = [
        sleeping.Case(groups, microbatches, True, slices, FORWARD_SECONDS, BACKWARD_SECONDS)
        for groups, microbatches, slices in sizes
    ]
    times = {case: sleeping.measure(case, conditions) for case in cases}
    targets = [
        Target(f"{case}: measured / simulated", of_case.median / of_case.simulated, LIMIT)
        for case, of_case in times.items()
    ]
    header = (
        "Seq1F1B, ms of the loop, tasks that sleep",
        "simulated at 20 and 40 ms",
        "simulated as measured",
        "measured",
        "ratio to 20 and 40 ms",
        "ratio to as measured",
        "bubble",
        "1F1B",
    )
    rows = tuple((*sleeping.row(case, of_case), *_bubbles(case)) for case, of_case in times.items())
    data = [dataclasses.asdict(case) | dataclasses.asdict(of_case) for case, of_case in times.items()]
    return Table("Slices that sleep", header, rows), targets, data


def _bubbles(case: sleeping.Case) -> tuple[str, str]:
    """The bubble of the slices, and of whole microbatches, in the simulator."""
    sliced, whole = mpmd.Seq1F1B(case.groups, case.slices), mpmd.Std1F1B(case.groups)
    simulations = (
        simulate(schedule.tasks(case.microbatches), Costs(kinds=case.seconds), slices=schedule.slices)
        for schedule in (sliced, whole)
    )
    bubbles = [simulation.bubble for simulation in simulations]
    return f"{bubbles[0]:.1%}", f"{bubbles[1]:.1%}"


def _train(sizes: Sizes, conditions: Conditions) -> tuple[Table, list[dict]]:
    schedules = (
        mpmd.Std1F1B(GROUPS),
        mpmd.Eager1F1B(GROUPS),
        mpmd.ZeroBubble(GROUPS),
        mpmd.Seq1F1B(GROUPS, SLICES),
    )
    with contextlib.ExitStack() as open_meshes:
        steps = {
            schedule.name: Training(
                open_meshes.enter_context(
                    cluster.launch(
                        {"stage": GROUPS},
                        "stage",
                        cpus_per_group=0.1,
                        runtime_env=GIVES_BACK,
                        timeout=START_SECONDS,
                    )
                ),
                schedule,
                sizes,
            )
            for schedule in schedules
        }
        peaks = {name: step.peaks() for name, step in steps.items()}
        times = interleaved(
            {name: functools.partial(seconds_of, step.run) for name, step in steps.items()},
            conditions.effort.repetitions,
        )
        reported = {name: step.reported() for name, step in steps.items()}
    title = f"GPT, {MICROBATCHES} microbatches of {sizes.seq_len} tokens, {GROUPS} groups"
    header = (
        f"slices of {', '.join(map(str, np.diff(sizes.bounds)))} tokens",
        "s of a step",
        f"of {BASELINE}",
        "MiB of group 0",
        "of the groups together",
        f"of {BASELINE}",
        "as reported",
    )
    rows = tuple(
        (
            name,
            f"{statistics.median(times[name]):.2f}",
            f"{ratio(times[name], times[BASELINE]):.2f}",
            _mebibytes(peaks[name][:1]),
            _mebibytes(peaks[name]),
            f"{sum(peaks[name]) / sum(peaks[BASELINE]):.2f}",
            _mebibytes(reported[name]),
        )
        for name in steps
    )
    data = [_data(name, times[name], peaks[name], reported[name]) for name in steps]
    return Table(title, header, rows), data


def _mebibytes(sizes: Sequence[int]) -> str:
    return f"{sum(sizes) / 2**20:.0f}"


def _data(name: str, times: Times, peaks: Sequence[int], reported: Sequence[int]) -> dict:
    return {"schedule": name, "seconds": times, "peak_bytes": peaks, "reported_bytes": reported}


class Training:
    """Steps of gradient descent on groups on Ray, of one process each, with one batch."""

    def __init__(self, mesh: cluster.ClusterMesh, schedule: mpmd.Schedule, sizes: Sizes):
        self._mesh = mesh
        self._params = gpt.init_params(jax.random.key(0), sizes.config)
        shape = (MICROBATCHES, 1, sizes.seq_len)
        numbers = np.random.default_rng(0)
        tokens, targets = numbers.integers(0, sizes.config.vocab_size, (2, *shape), dtype=np.int32)
        self._batch = jax.tree.map(jax.numpy.asarray, (tokens, targets))
        step = mpmd.jit(_train_step(schedule, sizes), mesh, donate_argnums=0)
        self._step = step.compile(self._params, *self._batch)

    def run(self) -> float:
        """Runs a step; its loss."""
        self._params, loss = self._step(self._params, *self._batch)
        jax.tree.map(lambda leaf: leaf.block_until_ready(), self._params)
        return float(loss)

    def peaks(self) -> list[int]:
        """The bytes that each group's process takes in the first steps on top of those before these.

        Later steps find memory that the process has kept.
        """
        pids = [group.pid for group in self._mesh.groups]
        before = [resident(pid) for pid in pids]
        for pid in pids:
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        for _ in range(FIRST_STEPS):
            self.run()
        return [peak_resident(pid) - start for pid, start in zip(pids, before, strict=True)]

    def reported(self) -> list[int]:
        """The peak of each group's device in the report, with what it holds before the step."""
        return [group.memory.peak_bytes for group in self._step.report().groups]


def _train_step(schedule: mpmd.Schedule, sizes: Sizes):
    def step(params, tokens, targets):
        def loss_and_gradients(microbatch):
            return jax.value_and_grad(gpt.sliced_loss)(params, *microbatch, sizes.config, sizes.bounds)

        loss, gradients = mpmd.treduce(
            loss_and_gradients, (tokens, targets), schedule=schedule, operation=mpmd.Mean
        )
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients), loss

    return step
