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
from cluster.process import world

DEVICES = (2, 4)
QUICK = DEVICES[:1]
CASES = {
    "many weights, few tokens": Workload(1, 8, layers=4, d_model=256, heads=8, seq_len=16, batch=16),
    "few weights, many tokens": Workload(1, 8, layers=4, d_model=64, heads=4, seq_len=128, batch=16),
}
DATA_PARALLEL, FSDP = "jit, data parallel", "jit, FSDP"
_LOSS_TOLERANCE = 1e-3

Runs = Mapping[str, Callable[[int], float]]
"""By the names of those compared: runs so many steps and returns the last loss."""


def run(conditions: Conditions) -> Result:
    tables, data = [], []
    for devices in QUICK if conditions.quick else DEVICES:
        rows = []
        for where in ("one process", "processes"):
            for case, times in _compare(devices, where == "processes", conditions).items():
                rows.append((f"{case}, {where}", times))
                data.append({"devices": devices, "case": case, "where": where, "seconds": times})
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


def _compare(devices: int, separate: bool, conditions: Conditions) -> dict[str, dict[str, Times]]:
    """Seconds of a step in each case, of all that use so many devices; ``separate`` processes or one."""
    with contextlib.ExitStack() as stack:
        runs_of = _jitted(devices, separate, conditions, stack)
        for of_group in (1, 2) if devices > 2 else (1,):
            start = _groups_on_ray if separate else _groups_in_process
            name = f"{devices // of_group} groups of {of_group}"
            for case, run in start(devices // of_group, of_group, conditions, stack).items():
                runs_of[case][name] = run
        return {case: _times(runs, conditions) for case, runs in runs_of.items()}


def _times(runs: Runs, conditions: Conditions) -> dict[str, Times]:
    losses = {name: [run(1), run(1)] for name, run in runs.items()}  # the first one may compile
    if any(not np.allclose(found, losses[FSDP], atol=_LOSS_TOLERANCE) for found in losses.values()):
        raise RuntimeError(f"the losses of the first two steps differ: {losses}")
    things = {}
    for name, run in runs.items():
        steps = conditions.effort.steps(seconds_of(functools.partial(run, 1)))
        things[name] = functools.partial(_seconds_per_step, run, steps)
    return interleaved(things, conditions.effort.repetitions)


def _seconds_per_step(run: Callable[[int], float], steps: int) -> float:
    run(1)  # meanwhile others had the caches
    return seconds_of(lambda: run(steps)) / steps


def _jitted(
    devices: int, separate: bool, conditions: Conditions, stack: contextlib.ExitStack
) -> dict[str, dict[str, Callable[[int], float]]]:
    processes = devices if separate else 1
    environment = cpu_environment(devices // processes, max(1, conditions.cores // processes))
    port = stack.enter_context(world.reserve_port()).getsockname()[1]
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(processes))
    hosts = [
        Host("benchmarks.global_mesh:Jitted", (rank, processes, port), environment)
        for rank in range(processes)
    ]
    # Together, because the processes of a world wait for one another at their end.
    stack.callback(lambda: [*pool.map(Host.close, hosts)])
    for host in hosts:
        host.ready()

    def run(case: str, name: str, steps: int) -> float:
        losses = [*pool.map(lambda host: host.call("run", case, name, steps), hosts)]
        return losses[0]

    return {
        case: {name: functools.partial(run, case, name) for name in (DATA_PARALLEL, FSDP)} for case in CASES
    }


def _groups_in_process(
    groups: int, of_group: int, conditions: Conditions, stack: contextlib.ExitStack
) -> Runs:
    environment = cpu_environment(groups * of_group, conditions.cores)
    host = Host("benchmarks.global_mesh:in_process", (groups, of_group), environment)
    stack.callback(host.close)
    host.ready()
    return {case: functools.partial(host.call, "run", case) for case in CASES}


def _groups_on_ray(groups: int, of_group: int, conditions: Conditions, stack: contextlib.ExitStack) -> Runs:
    cpus = min(conditions.cores / groups / 2, 1)  # half of what there is: two meshes are compared
    shape = {"stage": groups, "data": of_group}
    pipelines = Pipelines(cluster.launch(shape, "stage", cpus_per_group=cpus, timeout=START_SECONDS))
    stack.callback(pipelines.close)
    return {case: functools.partial(pipelines.run, case) for case in CASES}


def in_process(groups: int, of_group: int) -> Pipelines:
    """Over groups of fake devices of this process."""
    devices = np.array(jax.devices()).reshape(groups, of_group)
    return Pipelines(mpmd.MpmdMesh(Mesh(devices, ("stage", "data")), "stage"))


class Pipelines:
    """The step of each case as a pipeline over the groups of a mesh, which is closed in the end."""

    def __init__(self, mesh: Any):
        self._mesh = mesh
        self._steps, self._states, self._batches = {}, {}, {}
        for case, workload in CASES.items():
            workload = dataclasses.replace(workload, groups=mesh.mpmd_dim)
            state, batch = model.init_state(workload), model.batch(workload)
            rows = P(None, "data")
            step = mpmd.jit(
                model.train_step(workload), mesh, in_shardings=(P(), rows, rows), donate_argnums=0
            )
            self._steps[case] = step.compile(state, *batch)
            self._states[case], self._batches[case] = state, batch

    def run(self, case: str, steps: int) -> float:
        for _ in range(steps):
            self._states[case], loss = self._steps[case](self._states[case], *self._batches[case])
        for leaf in jax.tree.leaves(self._states[case]):
            leaf.block_until_ready()
        return float(loss)

    def close(self) -> None:
        self._mesh.close()


class Jitted:
    """The steps under ``jax.jit``, in one process of those over whose devices the mesh is."""

    def __init__(self, rank: int, num_processes: int, port: int):
        if num_processes > 1:
            world.join(("127.0.0.1", port), num_processes, rank, "127.0.0.1", START_SECONDS)
        self._steps = {}
        for case, workload in CASES.items():
            whole = dataclasses.replace(workload, microbatches=1)
            self._steps[case, DATA_PARALLEL] = _JittedStep(whole, fsdp=False)
            self._steps[case, FSDP] = _JittedStep(whole, fsdp=True)

    def run(self, case: str, name: str, steps: int) -> float:
        return self._steps[case, name].run(steps)

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
