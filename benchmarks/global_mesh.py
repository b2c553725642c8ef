"""A pipeline on groups of devices against ``jax.jit`` over one mesh of as many devices.

The same model, batch and optimizer, on the same number of devices: data parallel, with weights and optimizer
states replicated; FSDP, with both sharded over all devices; and pipelines, of groups of one device and of
two, data parallel within a group. ``jax.jit`` gets the whole batch at once, which is its best; the pipelines
get it in microbatches. Devices are fake ones of one process, where a collective is a copy in memory, or one
process for each device, or group, and then collectives and messages cross processes. All share the cores of
one machine, so that what a step computes costs all of them alike, and the rest shows.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from benchmarks import model
from benchmarks.host import Host
from benchmarks.measure import Conditions, Result, Table, Times, interleaved, ratio, seconds_of
from benchmarks.peers import cpu_environment
from benchmarks.peers.ours import START_SECONDS
from benchmarks.workload import Workload
from cluster import world

DEVICES = (2, 4)
QUICK = DEVICES[:1]
CASES = {
    "many weights, few tokens": Workload(1, 8, layers=8, d_model=256, heads=8, seq_len=16, batch=16),
    "few weights, many tokens": Workload(1, 8, layers=8, d_model=64, heads=4, seq_len=128, batch=32),
}
DATA_PARALLEL, FSDP = "jit, data parallel", "jit, FSDP"
_LOSS_TOLERANCE = 1e-3

Run = Callable[[int], float]
"""Runs so many steps and returns the last loss."""


def run(conditions: Conditions) -> Result:
    tables, data = [], []
    for devices in QUICK if conditions.quick else DEVICES:
        rows = []
        for name, workload in CASES.items():
            for where in ("one process", "processes"):
                times = _compare(workload, devices, where == "processes", conditions)
                rows.append((f"{name}, {where}", times))
                data.append({"devices": devices, "case": name, "where": where, "seconds": times})
        tables.append(_table(devices, rows))
    return Result(tables, [], data)


def _table(devices: int, rows: list[tuple[str, Mapping[str, Times]]]) -> Table:
    """Milliseconds of a step and, of the pipelines, how many times those of either ``jax.jit``."""
    names = list(rows[0][1])
    lines = []
    for label, times in rows:
        cells = []
        for name in names:
            cell = f"{statistics.median(times[name]) * 1e3:.1f}"
            if name not in (DATA_PARALLEL, FSDP):
                ratios = (f"{ratio(times[name], times[jit]):.2f}x" for jit in (DATA_PARALLEL, FSDP))
                cell += f" ({', '.join(ratios)})"
            cells.append(cell)
        lines.append((label, *cells))
    header = ("ms per step (times data parallel, FSDP)", *names)
    return Table(f"Pipelines and one global mesh, {devices} devices", header, tuple(lines))


def _compare(workload: Workload, devices: int, separate: bool, conditions: Conditions) -> dict[str, Times]:
    """Seconds of a step, of all that use so many devices, in as many processes if ``separate``."""
    with contextlib.ExitStack() as stack:
        runs = _jitted(workload, devices, separate, conditions, stack)
        for of_group in (1, 2) if devices > 2 else (1,):
            groups = dataclasses.replace(workload, groups=devices // of_group)
            start = _groups_on_ray if separate else _groups_in_process
            name = f"{groups.groups} groups of {of_group}"
            runs[name] = start(groups, of_group, conditions, stack)
        losses = {name: [run(1), run(1)] for name, run in runs.items()}  # the first one may compile
        expected = losses[DATA_PARALLEL]
        if any(not np.allclose(found, expected, atol=_LOSS_TOLERANCE) for found in losses.values()):
            raise RuntimeError(f"the losses of the first two steps differ: {losses}")
        steps = {
            name: conditions.effort.steps(seconds_of(functools.partial(run, 1))) for name, run in runs.items()
        }
        timed = {name: functools.partial(_seconds_per_step, run, steps[name]) for name, run in runs.items()}
        return interleaved(timed, conditions.effort.repetitions)


def _seconds_per_step(run: Run, steps: int) -> float:
    run(1)  # meanwhile others had the caches
    return seconds_of(lambda: run(steps)) / steps


def _jitted(
    workload: Workload, devices: int, separate: bool, conditions: Conditions, stack: contextlib.ExitStack
) -> dict[str, Run]:
    processes = devices if separate else 1
    threads = max(1, conditions.cores // processes)
    environment = cpu_environment(devices // processes, threads)
    port = stack.enter_context(world.reserve_port()).getsockname()[1]
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(processes))
    hosts = [
        Host("benchmarks.global_mesh:Jitted", (workload, rank, processes, port), environment)
        for rank in range(processes)
    ]
    for host in hosts:
        stack.callback(host.close)
    for host in hosts:
        host.ready()

    def run(name: str, steps: int) -> float:
        losses = [*pool.map(lambda host: host.call("run", name, steps), hosts)]
        return losses[0]

    return {name: functools.partial(run, name) for name in (DATA_PARALLEL, FSDP)}


def _groups_in_process(
    workload: Workload, of_group: int, conditions: Conditions, stack: contextlib.ExitStack
) -> Run:
    environment = cpu_environment(workload.groups * of_group, conditions.cores)
    host = Host("benchmarks.global_mesh:in_process", (workload, of_group), environment)
    stack.callback(host.close)
    host.ready()
    return functools.partial(host.call, "run")


def _groups_on_ray(
    workload: Workload, of_group: int, conditions: Conditions, stack: contextlib.ExitStack
) -> Run:
    shape = {"stage": workload.groups, "data": of_group}
    share = conditions.cores / workload.groups
    mesh = cluster.launch(shape, "stage", cpus_per_group=min(share / 2, 1), timeout=START_SECONDS)
    groups = Groups(workload, mesh)
    stack.callback(groups.close)
    return groups.run


def in_process(workload: Workload, of_group: int) -> Groups:
    """Groups of fake devices of this process."""
    devices = np.array(jax.devices()).reshape(workload.groups, of_group)
    return Groups(workload, mpmd.MpmdMesh(Mesh(devices, ("stage", "data")), "stage"))


class Groups:
    """The step as a pipeline over the groups of a mesh, which it closes in the end."""

    def __init__(self, workload: Workload, mesh: Any):
        self._mesh = mesh
        self._state, self._batch = model.init_state(workload), model.batch(workload)
        rows = P(None, "data")
        step = mpmd.mpmd_jit_with_loop(
            model.train_step(workload), mesh, in_specs=(P(), rows, rows), donate_argnums=0
        )
        self._step = step.compile(self._state, *self._batch)

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._state, loss = self._step(self._state, *self._batch)
        for leaf in jax.tree.leaves(self._state):
            leaf.block_until_ready()
        return float(loss)

    def close(self) -> None:
        self._mesh.close()


class Jitted:
    """The steps under ``jax.jit``, in one process of those over whose devices the mesh is."""

    def __init__(self, workload: Workload, rank: int, num_processes: int, port: int):
        if num_processes > 1:
            world.join(("127.0.0.1", port), num_processes, rank, "127.0.0.1", START_SECONDS)
        whole = dataclasses.replace(workload, microbatches=1)
        self._steps = {DATA_PARALLEL: _JittedStep(whole, fsdp=False), FSDP: _JittedStep(whole, fsdp=True)}

    def run(self, name: str, steps: int) -> float:
        return self._steps[name].run(steps)

    def close(self) -> None:
        pass


class _JittedStep:
    def __init__(self, workload: Workload, fsdp: bool):
        mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
        rows, replicated = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P())
        state = model.init_state(workload)
        shardings = jax.tree.map(lambda leaf: _fully_sharded(leaf, mesh) if fsdp else replicated, state)
        self._step = jax.jit(
            model.train_step(workload),
            in_shardings=(shardings, rows, rows),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        )
        self._state = jax.tree.map(_global, state, shardings)
        self._batch = [_global(array, rows) for array in model.batch(workload)]

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._state, loss = self._step(self._state, *self._batch)
            # Of two steps under way, one may hold the threads that the other's collectives wait for.
            jax.block_until_ready(self._state)
        return float(loss)


def _global(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array over the devices of all processes, of what each process has as a whole."""
    return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)


def _fully_sharded(leaf: jax.Array, mesh: Mesh) -> NamedSharding:
    """The first dimension that divides over the devices is split."""
    dimension = next((i for i, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
    return NamedSharding(mesh, P() if dimension is None else P(*[None] * dimension, "data"))
