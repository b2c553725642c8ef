"""A step on a device: its profile, its memory, its bits, the rates of the device, and larger groups.

A step of a GPT runs twice in one process, and in a second process that compiles for itself, with and without
XLA's flag for deterministic operations; a digest tells whether each executable repeats its bits.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd
from benchmarks import model
from benchmarks.frame import Row, Rows, Setup, in_process_mesh
from benchmarks.host import Host
from benchmarks.workload import Workload
from mpmd.ir.plan import Executable
from mpmd.program import arguments
from mpmd.runtime.compiling import compile_executable
from tests.support.digests import digests

STAGES = 4
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
WHOLE_STEP = "the step"
LOSS_TOLERANCE = 2e-2
"""The largest difference of losses: GPUs round operands of products to fewer bits than float32 has."""


def workload(setup: Setup) -> Workload:
    """A GPT whose state and activations fit into a few GB; tiny when quick."""
    if setup.quick:
        return Workload(STAGES, 8, layers=4, d_model=64, heads=4, seq_len=32, batch=16)
    return Workload(STAGES, 8, layers=8, d_model=768, heads=12, seq_len=512, batch=16)


def run(setup: Setup) -> Rows:
    for device in jax.devices():
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        kinds = ", ".join(sorted(memory.kind for memory in device.addressable_memories()))
        cells = {"": str(device), "kind": device.device_kind, "kinds of memory": kinds}
        yield "Devices", {**cells, "GiB for the allocator": limit / 2**30}
    calibrated = mpmd.Cluster.of_this_process(jax.devices()[:1], measure=True)
    for name, curve in calibrated.rates.items():
        yield "Rates that the planner reads", {"": name, "per second": curve.rate, "half at": curve.half}
    faults: list[str] = []
    yield from _profile(setup, faults)
    yield from _memory(setup)
    if setup.devices > 1:
        yield _several_devices(setup, faults)
    yield from _bits(setup, faults)
    if faults:
        raise RuntimeError("; ".join(faults))


def _on_one_group(setup: Setup, mesh: Any) -> Any:
    """The step of four stages, all on one group."""
    schedule = mpmd.Interleaved1F1B(num_stages=STAGES, mpmd_dim=1)
    return mpmd.jit(model.train_step(workload(setup), schedule), mesh)


def _profile(setup: Setup, faults: list[str]) -> Rows:
    """The milliseconds of each executable in a step, by the host's clock and as the devices have recorded."""
    state, batch = model.init_state(workload(setup)), model.batch(workload(setup))
    with in_process_mesh(1) as mesh, tempfile.TemporaryDirectory() as folder:
        step = _on_one_group(setup, mesh).compile(state, *batch)
        jax.block_until_ready(step(state, *batch))
        by_host = step.profile(state, *batch).events
        on_device = step.profile(state, *batch, trace_dir=folder).events
        is_traced = mpmd.collective_seconds(folder) is not None
    labels: dict[str, set[str]] = {}
    for each in (run for program in step.plan.programs for run in program.runs):
        labels.setdefault(each.executable, set()).add(str(each.task))
    for executable, tasks in labels.items():
        ms = {
            source: sum(1e3 * event.duration for event in events if event.label in tasks)
            for source, events in (("ms by the host", by_host), ("ms on the device", on_device))
        }
        yield "Executables in one step", {"": executable, **ms}
    if not is_traced:
        faults.append("the trace has no operations of the device")


def _memory(setup: Setup) -> Rows:
    """The planned peak of each group, beside the allocator's, after some steps on Ray."""
    with setup.launch({"stage": STAGES}, "stage") as mesh:
        state, batch = model.init_state(workload(setup)), model.batch(workload(setup))
        step = mpmd.jit(model.train_step(workload(setup)), mesh, donate_argnums=0).compile(state, *batch)
        for _ in range(3):
            state, loss = step(state, *batch)
        jax.block_until_ready((state, loss))
        for group in step.report().groups:
            measured = group.measured_peak_bytes
            yield (
                "Memory of a device, MiB",
                {
                    "group": str(group.mpmd_idx),
                    "planned peak": group.peak_bytes / 2**20,
                    "allocator's peak": "not counted" if measured is None else measured / 2**20,
                },
            )


def _several_devices(setup: Setup, faults: list[str]) -> tuple[str, Row]:
    """The loss of groups of two devices on Ray, each of one process, beside the loss of ``jax.jit``."""
    groups = 2 if setup.devices >= 4 else 1
    case = dataclasses.replace(workload(setup), groups=groups)
    state, batch = model.init_state(case), model.batch(case)
    _, expected = jax.jit(model.train_step(case))(state, *batch)
    options = {"gpus_per_group": None, "processes_per_group": 1, "cpus_per_group": 0.5}
    with setup.launch({"stage": groups, "data": 2}, "stage", **options) as mesh:
        rows = P(None, "data")
        _, loss = mpmd.jit(model.train_step(case), mesh, in_shardings=(P(), rows, rows))(state, *batch)
        difference = abs(float(loss) - float(expected))
    if not difference <= LOSS_TOLERANCE:  # also for NaN
        faults.append(f"groups of two devices: the loss differs from jax.jit by {difference}")
    return "Groups of two devices", {"": f"{groups} groups", "difference of losses from jax.jit": difference}


def _bits(setup: Setup, faults: list[str]) -> Rows:
    for way in ("", DETERMINISTIC):
        flags = f"{os.environ.get('XLA_FLAGS', '')} {way}".strip()
        environment = {**setup.environment(1, setup.cores), "XLA_FLAGS": flags}
        processes = []
        for _ in range(2):
            with Host("benchmarks.device:Repeated", (setup,), environment) as host:
                processes.append(host.call("bits"))
        first, second = processes
        again = [name for name, (one, other) in first.items() if one != other]
        yield _bits_row(way, "a second run", again)
        yield _bits_row(way, "another process", [name for name in first if first[name][0] != second[name][0]])
        if way and again:
            faults.append(f"with {DETERMINISTIC} a second run differs: {', '.join(again)}")


def _bits_row(way: str, other: str, differing: Sequence[str]) -> tuple[str, Row]:
    executables = ", ".join(name for name in differing if name != WHOLE_STEP)
    cells = {"flags": way or "none", "compared with": other}
    cells["the step repeats"] = "no" if WHOLE_STEP in differing else "yes"
    return "Bits", {**cells, "executables that do not": executables}


class Repeated:
    """Runs a step, and each of its executables, twice; made in a process of its own, by ``Host``."""

    def __init__(self, setup: Setup):
        self._setup = setup

    def bits(self) -> Mapping[str, Sequence[list[str]]]:
        """Returns the digests of both runs, of the step and of each executable."""
        state, batch = model.init_state(workload(self._setup)), model.batch(workload(self._setup))
        with in_process_mesh(1) as mesh:
            lowered = _on_one_group(self._setup, mesh).lower(state, *batch)
            step = lowered.compile()
            found = {WHOLE_STEP: [digests(step(state, *batch)) for _ in range(2)]}
            program, (submesh,) = lowered.compiled.program, mesh.unstack
            for executable in program.plan.executables:
                closed = _on_one_device(executable)
                function = compile_executable(closed, program.functions[executable.name], submesh)
                values = [_arbitrary(each) for each in arguments(closed)]
                runs = ([jnp.array(value) for value in values] for _ in range(2))
                found[executable.name] = [digests(function(*each)) for each in runs]
        return found


def _on_one_device(executable: Executable) -> Executable:
    """The executable without open specs: on one device there is nothing to choose."""
    in_specs, out_specs = (
        tuple(spec or () for spec in specs) for specs in (executable.in_specs, executable.out_specs)
    )
    return dataclasses.replace(executable, in_specs=in_specs, out_specs=out_specs)


def _arbitrary(array: jax.ShapeDtypeStruct) -> np.ndarray:
    """Normal floats or small integers of a shape and dtype; the same values in each process."""
    random = np.random.default_rng(0)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return random.standard_normal(array.shape).astype(array.dtype)
    return random.integers(0, 2, array.shape).astype(array.dtype)
