"""The cost of capturing a task, and of running it again alone.

For a task of each kind of a transformer's stage, in this process: the seconds that ``step.capture`` takes
beside those of a step, the bytes of the directory beside those of the task's operands, and the seconds of
``mpmd replay``, which starts a process.

Then a step on a mesh that writes tasks that fail, beside one that does not: as it is, where nothing is to be
done, and with NaNs refused, where each task copies what it takes over.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

import mpmd
from benchmarks import model
from benchmarks.host import Host
from benchmarks.measure import Conditions, Result, Table, Target, interleaved, ratio, seconds_of
from benchmarks.peers import cpu_environment
from benchmarks.throughput import workload

WORKLOAD = workload(groups=4, microbatches=8)
TASKS = ("fwd_0__3", "bwd_1__3", "bwd_3__3", "after_0")
WITHOUT, WITH = "without", "with capture"
WRITTEN_SECONDS, BYTES_BESIDE_OPERANDS = 2.0, 2**20


def run(conditions: Conditions) -> Result:
    with contextlib.closing(
        Host("benchmarks.replay:Captures", (), cpu_environment(WORKLOAD.groups, conditions.cores))
    ) as host:
        host.ready()
        captured = host.call("of_tasks", conditions.effort.repetitions)
        steps = host.call("of_steps", max(5, conditions.effort.repetitions))
    rows = [
        (
            task,
            f"{each['operands'] / 1e6:.2f}",
            f"{each['beside'] / 1e3:.0f}",
            f"{each['written']:.2f}",
            f"{each['replayed']:.1f}",
        )
        for task, each in captured.items()
    ]
    header = (str(WORKLOAD), "operands, MB", "beside them, KB", "written, s", "mpmd replay, s")
    tables = [Table("A captured task", header, tuple(rows)), _table_of_steps(steps)]
    slowest = max(each["written"] for each in captured.values())
    largest = max(each["beside"] for each in captured.values())
    targets = [
        Target("capturing a task, slowest, seconds", slowest, WRITTEN_SECONDS),
        Target("bytes beside the operands, largest", largest, BYTES_BESIDE_OPERANDS),
    ]
    return Result(tables, targets, {"captured": captured, "steps": steps})


def _table_of_steps(steps: dict[str, dict[str, list[float]]]) -> Table:
    rows = [
        (
            name,
            *(f"{statistics.median(times[which]) * 1e3:.1f}" for which in (WITHOUT, WITH)),
            f"{ratio(times[WITH], times[WITHOUT]):.2f}",
        )
        for name, times in steps.items()
    ]
    return Table("A step of a mesh with capture=", ("milliseconds", WITHOUT, WITH, "ratio"), tuple(rows))


class Captures:
    """Captures tasks of one step; made in a process of its own, by ``Host``."""

    def __init__(self) -> None:
        self._state, self._batch = model.init_state(WORKLOAD), model.batch(WORKLOAD)

    def close(self) -> None:
        """Nothing is open between calls."""

    def of_tasks(self, repetitions: int) -> dict[str, dict[str, float]]:
        """For each task, the bytes and the seconds."""
        with self._step(None) as step, tempfile.TemporaryDirectory() as directory:
            step(self._state, *self._batch)
            return {task: self._of_task(step, task, Path(directory), repetitions) for task in TASKS}

    def _of_task(self, step, task: str, directory: Path, repetitions: int) -> dict[str, float]:
        paths = [directory / f"{task}-{number}" for number in range(repetitions)]
        plain, written = [], []
        for path in paths:
            plain.append(_seconds_of_step(step, self._state, *self._batch))
            capture = functools.partial(step.capture, task=task, to=path)
            written.append(_seconds_of_step(capture, self._state, *self._batch))
        operands = sum(array.nbytes for array in mpmd.replay.load(paths[0]).inputs.values())
        nbytes = sum(file.stat().st_size for file in paths[0].iterdir())
        return {
            "operands": operands,
            "beside": nbytes - operands,
            "written": statistics.median(written) - statistics.median(plain),
            "replayed": seconds_of(functools.partial(_replay, paths[0])),
        }

    def of_steps(self, repetitions: int) -> dict[str, dict[str, list[float]]]:
        """The seconds of a step on a mesh without and with capture, as it is and with NaNs refused."""
        with contextlib.ExitStack() as open_steps, tempfile.TemporaryDirectory() as directory:
            steps = {
                name: open_steps.enter_context(self._step(capture))
                for name, capture in ((WITHOUT, None), (WITH, directory))
            }
            results = {}
            for name, refuses in (("as it is", False), ("with NaNs refused", True)):
                timed = {
                    which: functools.partial(self._seconds, step, refuses) for which, step in steps.items()
                }
                times = interleaved(timed, repetitions)
                results[name] = {which: list(seconds) for which, seconds in times.items()}
            return results

    def _seconds(self, step, refuses: bool) -> float:
        with jax.debug_nans(refuses):
            return _seconds_of_step(step, self._state, *self._batch)

    @contextlib.contextmanager
    def _step(self, capture: str | None) -> Iterator:
        devices = jax.sharding.Mesh(jax.devices()[: WORKLOAD.groups], "stage")
        with mpmd.MpmdMesh(devices, "stage", capture=capture) as mesh:
            yield mpmd.jit(model.train_step(WORKLOAD), mesh).compile(self._state, *self._batch)


def _seconds_of_step(step, *args) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(*args))
    return time.perf_counter() - start


def _replay(directory: Path) -> None:
    command = [sys.executable, "-m", "mpmd", "replay", os.fspath(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"mpmd replay {directory} returned {done.returncode}: {done.stdout}{done.stderr}")
