"""Seconds that train steps of scanned models take to compile, beside ``jax.jit`` of the same steps.

    python -m benchmarks.compile_beside_jit                             every model, three times
    python -m benchmarks.compile_beside_jit llama3 --repetitions 5      one of them

Each time is that of a process of its own, in which nothing is compiled before, and JAX keeps nothing on disk.
The two ways take turns. Seconds of processors are those of all threads, and depend less on what else the
machine does. All groups are in one process, which compiles for all of them.

On Ray each group compiles its own stages, beside the others, on hosts of its own. The last two columns are
for that: the passes, and the executables of the group that takes longest, alone on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.scanned_models import MODELS

if TYPE_CHECKING:
    from mpmd import MpmdMesh
    from mpmd.step.lowered_step import LoweredStep

WAYS = ("jit", "mpmd", "longest_group")


def main() -> None:
    parser = argparse.ArgumentParser(description="how long scanned models take to compile, beside jax.jit")
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[], metavar="MODEL")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="compile one model here, this way; print what it took")
    args = parser.parse_args()
    if args.way:
        (model,) = args.models
        print(json.dumps(compile_here(model, args.way)))
        return
    print(
        f"{'model':36}{'jax.jit: s':>11}{'of processors':>15}{'mpmd: s':>9}{'of processors':>15}"
        f"{'ratio':>7}{'of processors':>15}{'executables':>13}{'of groups':>11}"
        f"{'longest group: s':>18}{'ratio':>7}"
    )
    for model in args.models or MODELS:
        turns = [{way: in_a_process(model, way) for way in WAYS} for _ in range(args.repetitions)]
        print(row(model, turns), flush=True)


def row(model: str, turns: list[dict[str, dict]]) -> str:
    def seconds(way: str, kind: str) -> float:
        return statistics.median(turn[way][kind] for turn in turns)

    def ratio(way: str, kind: str) -> float:
        return statistics.median(turn[way][kind] / turn["jit"][kind] for turn in turns)

    counts = turns[0]["mpmd"]
    return (
        f"{model:36}{seconds('jit', 'wall'):11.1f}{seconds('jit', 'cpu'):15.1f}"
        f"{seconds('mpmd', 'wall'):9.1f}{seconds('mpmd', 'cpu'):15.1f}"
        f"{ratio('mpmd', 'wall'):7.2f}{ratio('mpmd', 'cpu'):15.2f}"
        f"{counts['executables']:13}{counts['of_groups']:11}"
        f"{seconds('longest_group', 'wall'):18.1f}{ratio('longest_group', 'wall'):7.2f}"
    )


def in_a_process(model: str, way: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "benchmarks.compile_beside_jit", model, "--way", way]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def compile_here(model: str, way: str) -> dict:
    import jax
    import numpy as np

    import mpmd

    step = MODELS[model]()
    devices = np.array(jax.devices()[: step.num_stages])
    clock = Clock()
    if way == "jit":
        jax.jit(step.fun).lower(*step.args).compile()
        return clock.seconds()
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage")
    if way == "longest_group":
        return longest_group(mpmd.jit(step.fun, mesh).lower(*step.args), mesh, clock)
    plan = mpmd.jit(step.fun, mesh).compile(*step.args).plan
    of_groups = sum(len(plan.executables_of(i)) for i in range(step.num_stages))
    counts = {"executables": len(plan.executables), "of_groups": of_groups}
    return {**clock.seconds(), **counts}


class Clock:
    """The seconds since it was made: by the clock, and of this process's threads."""

    def __init__(self):
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        return {"wall": time.perf_counter() - self._wall, "cpu": time.process_time() - self._cpu}


def longest_group(lowered: LoweredStep, mesh: MpmdMesh, clock: Clock) -> dict[str, float]:
    """The seconds of the passes, and of the executables of the group that takes longest to compile them."""
    import jax

    from mpmd.runtime.compiling import compile_executable

    passes = clock.seconds()
    functions = lowered.compiled.program.functions
    groups = []
    for i, submesh in enumerate(mesh.unstack):
        jax.clear_caches()  # of the group before
        clock = Clock()
        for executable in lowered.plan.executables_of(i):
            compile_executable(executable, functions[executable.name], submesh)
        groups.append(clock.seconds())
    longest = max(groups, key=lambda seconds: seconds["wall"])
    return {kind: passes[kind] + longest[kind] for kind in passes}


if __name__ == "__main__":
    main()
