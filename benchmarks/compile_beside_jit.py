"""Seconds that train steps of scanned models take to compile, beside ``jax.jit`` of the same steps.

    python -m benchmarks.compile_beside_jit                             every model, three times
    python -m benchmarks.compile_beside_jit llama3 --repetitions 5      one of them

Each time is that of a process of its own, in which nothing is compiled before, and JAX keeps nothing on disk.
The two ways take turns. Seconds of processors are those of all threads, and depend less on what else the
machine does. All groups are in one process, which compiles for all of them; on Ray each group compiles its
own stages, beside the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.scanned_models import MODELS

WAYS = ("jit", "mpmd")


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
    )
    for model in args.models or MODELS:
        turns = [{way: in_a_process(model, way) for way in WAYS} for _ in range(args.repetitions)]
        print(row(model, turns), flush=True)


def row(model: str, turns: list[dict[str, dict]]) -> str:
    columns = [
        statistics.median(turn[way][kind] for turn in turns) for way in WAYS for kind in ("wall", "cpu")
    ]
    ratios = [
        statistics.median(turn["mpmd"][kind] / turn["jit"][kind] for turn in turns)
        for kind in ("wall", "cpu")
    ]
    jit_wall, jit_cpu, mpmd_wall, mpmd_cpu = columns
    counts = turns[0]["mpmd"]
    return (
        f"{model:36}{jit_wall:11.1f}{jit_cpu:15.1f}{mpmd_wall:9.1f}{mpmd_cpu:15.1f}"
        f"{ratios[0]:7.2f}{ratios[1]:15.2f}{counts['executables']:13}{counts['of_groups']:11}"
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
    counts = {}
    wall, cpu = time.perf_counter(), time.process_time()
    if way == "jit":
        jax.jit(step.fun).lower(*step.args).compile()
    else:
        mesh = mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage")
        plan = mpmd.jit(step.fun, mesh).compile(*step.args).plan
        of_groups = sum(len(plan.executables_of(i)) for i in range(step.num_stages))
        counts = {"executables": len(plan.executables), "of_groups": of_groups}
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, **counts}


if __name__ == "__main__":
    main()
