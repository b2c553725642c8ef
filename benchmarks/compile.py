"""Seconds to compile train steps, beside ``jax.jit`` of the same steps.

Each time is that of a process of its own, in which nothing is compiled before, and JAX keeps nothing on disk.
``jax.jit`` and ``mpmd`` take turns. Seconds of processors count all threads of the process, and depend less
on the other programs of the machine. In one process the groups share the cores, and equal stages compile
once. On Ray each group compiles its own stages beside the other groups, on machines of their own: for that,
the longest group is the passes and the executables of the group that takes longest, alone on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import mpmd
from benchmarks import model
from benchmarks.frame import Row, Rows, Setup, in_process_mesh, ratio
from benchmarks.host import Host
from benchmarks.workload import Workload
from examples import gpt
from mpmd.runtime.compiling import compile_executable

WRITTEN_OUT, SCANNED = "gpt", "gpt, scanned"
"""The GPT of the examples, with a Python loop over its layers, and with a scan."""

WALL, PROCESSORS = "s", "s of processors"
PASSES_APART = ("jax", "export", "load")
"""Parts of ``Report.seconds`` that are not our passes: JAX's trace, the export, and loading."""


class Case(NamedTuple):
    """A GPT, and its groups.

    Attributes:
      model: how its layers are written.
      devices: of each group, data parallel.
      processes: of each group on Ray; 0 for groups in one process.
    """

    model: str
    layers: int
    stages: int
    devices: int = 1
    processes: int = 0

    def __str__(self) -> str:
        where = f"on Ray, {self.processes} processes each" if self.processes else "in process"
        size = f"{self.layers} layers in {self.stages} stages"
        return f"{self.model}, {size}, groups of {self.devices} {where}"


CASES = (
    Case(WRITTEN_OUT, 8, 2),
    Case(WRITTEN_OUT, 24, 8),
    Case(SCANNED, 10, 4),
    Case(SCANNED, 16, 8),
    Case(SCANNED, 96, 8),
    Case(WRITTEN_OUT, 24, 4, devices=4),
    Case(WRITTEN_OUT, 24, 2, processes=1),
    Case(WRITTEN_OUT, 24, 2, devices=4, processes=2),
)


def run(setup: Setup) -> Rows:
    if not setup.quick:
        setup.join_ray()
    for case in setup.cases(CASES, CASES[:1]):
        is_plain = case.devices == 1 and not case.processes
        ways = ("jit", "pipeline", *(["longest_group"] if is_plain else []))
        environment = setup.environment(case.stages * case.devices, setup.cores)
        environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        measured: dict[str, list[Row]] = {way: [] for way in ways}
        for _ in range(setup.repetitions):
            for way in ways:
                with Host("benchmarks.compile:Compiler", (case, setup), environment) as host:
                    measured[way].append(host.call(way))
        columns = {
            way: {name: [row[name] for row in rows] for name in rows[0]} for way, rows in measured.items()
        }
        yield from rows_of(case, columns)


def rows_of(case: Case, found: Mapping[str, Mapping[str, list]]) -> Rows:
    jit, pipeline = found["jit"], found["pipeline"]
    counts = {name: pipeline[name][0] for name in ("executables", "of groups")}
    beside = {f"jax.jit, {kind}": jit[kind] for kind in jit}
    beside |= {f"mpmd, {kind}": pipeline[kind] for kind in jit}
    beside |= {f"mpmd / jit, {kind}": ratio(pipeline[kind], jit[kind]) for kind in jit}
    if longest := found.get("longest_group"):
        beside |= {"longest group / jit": ratio(longest[WALL], jit[WALL])}
    yield "Compiling beside jax.jit", {"": str(case), **counts, **beside}
    parts = {name: of for name, of in pipeline.items() if name not in (*counts, *jit)}
    yield "Seconds of compiling a pipeline", {"": str(case), **parts}


class Compiler:
    """Compiles a step once; made in a process of its own, by ``Host``."""

    def __init__(self, case: Case, setup: Setup):
        self._case, self._setup = case, setup
        sizes = {"layers": case.layers, "d_model": 128, "heads": 4, "seq_len": 64, "batch": 32}
        workload = Workload(case.stages, microbatches=8, **sizes)
        params = jax.eval_shape(lambda: gpt.init_params(jax.random.key(0), model.config_of(workload)))
        loss = gpt.loss
        if case.model == SCANNED:
            params, loss = jax.eval_shape(stacked, params), scanned_loss
        self._step = model.train_step(workload, loss=loss)
        state = params, jax.eval_shape(model.OPTIMIZER.init, params)
        self._args = (state, *model.batch(workload))
        rows = P(None, "data")
        self._shardings = (P(), *[rows] * (len(self._args) - 1))

    def jit(self) -> dict[str, float]:
        clock = Clock()
        jax.jit(self._step).lower(*self._args).compile()
        return clock.seconds()

    def pipeline(self) -> dict[str, float]:
        """Returns the seconds in all and of parts, and the number of executables."""
        case = self._case
        axes = {"data": case.devices}
        with (
            self._setup.launch(
                {"stage": case.stages, **axes},
                "stage",
                processes_per_group=case.processes,
                compilation_cache=None,
            )
            if case.processes
            else in_process_mesh(case.stages, **axes)
        ) as mesh:
            clock = Clock()
            step = mpmd.jit(self._step, mesh, in_shardings=self._shardings)
            loaded = step.compile(*self._args)
            taken, report = clock.seconds(), loaded.report()
        apart = {name: report.seconds.get(name, 0.0) for name in PASSES_APART}
        return {
            **taken,
            "executables": len(loaded.plan.executables),
            "of groups": sum(len(loaded.plan.executables_of(i)) for i in range(case.stages)),
            "our passes": sum(report.seconds.values()) - sum(apart.values()),
            **apart,
            "XLA, slowest group": max(group.xla_seconds or 0.0 for group in report.groups),
        }

    def longest_group(self) -> dict[str, float]:
        """Returns the seconds of the passes and of the group whose executables take longest."""
        mesh = in_process_mesh(self._case.stages, data=1)
        clock = Clock()
        step = mpmd.jit(self._step, mesh, in_shardings=self._shardings)
        lowered = step.lower(*self._args)
        passes, groups = clock.seconds(), []
        for i, submesh in enumerate(mesh.unstack):
            jax.clear_caches()  # of the group before
            clock = Clock()
            for executable in lowered.plan.executables_of(i):
                compile_executable(executable, lowered.compiled.program.functions[executable.name], submesh)
            groups.append(clock.seconds())
        longest = max(groups, key=lambda seconds: seconds[WALL])
        return {kind: passes[kind] + longest[kind] for kind in passes}


def stacked(params: dict) -> dict:
    """The parameters with one array for all layers."""
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])}


def scanned_loss(params: dict, tokens: jax.Array, targets: jax.Array, config: gpt.GPTConfig) -> jax.Array:
    def body(x, layer):
        x = gpt.block(layer, x, config.num_heads)
        return mpmd.mark_stage_end(x, num_stages=config.num_stages), None

    x, _ = jax.lax.scan(body, model.embed(params, tokens), params["blocks"])
    return model.head_loss(params, x, targets)


class Clock:
    """Seconds since it was made, by the clock and of this process's threads."""

    def __init__(self):
        self._wall, self._processors = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        return {
            WALL: time.perf_counter() - self._wall,
            PROCESSORS: time.process_time() - self._processors,
        }
