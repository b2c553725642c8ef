"""The time to compile a train step of a GPT, pass by pass.

    python benchmarks/compile_time.py           24 layers on 8 groups, then how the time grows
    python benchmarks/compile_time.py --xla     24 layers on 8 groups, to the end: XLA on each group too
    python benchmarks/compile_time.py --scanned     8 and 96 layers of one scan, on 8 groups
    python benchmarks/compile_time.py --stages 4 --devices 4    to the end, on groups of 1 and of 4 devices
    python benchmarks/compile_time.py --stages 2 --devices 4 --processes 2 --ray    the same on Ray, in actors

``python -m benchmarks.compile_beside_jit`` compares with ``jax.jit`` of the same step.

Times are medians, without what JAX remembers of an earlier trace. They are compared with how long
``jax.make_jaxpr`` takes for the same function, because any compiler has to trace it.
"""

import argparse
import dataclasses
import functools
import gc
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import common
import gpt
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

import mpmd
from mpmd.compiler.pipeline import CompiledStep, compile_step
from mpmd.compiler.request import CompileRequest
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.program import export_function
from mpmd.util.stopwatch import Stopwatch

LAYERS = (6, 12, 24, 48)
SCANNED_LAYERS = (8, 96)
MICROBATCHES = (8, 32, 128)
PLANS = ((16, 64), (32, 128), (64, 512))
D_MODEL, HEADS, SEQ_LEN, BATCH = 128, 4, 64, 4
LAUNCH_SECONDS = 240.0
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description="how long it takes to compile a train step")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--stages", type=int, default=8, help="one stage on each group")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--xla", action="store_true", help="let the groups compile, and print the report")
    parser.add_argument("--scanned", action="store_true", help="how the time grows with layers of one scan")
    parser.add_argument("--devices", type=int, help="compare groups of so many with groups of one device")
    parser.add_argument("--ray", action="store_true", help="with --devices, an actor for each process")
    parser.add_argument("--processes", type=int, default=1, help="of each group of --devices on Ray")
    args = parser.parse_args()
    if args.ray and not args.devices:
        parser.error("--ray is for groups of --devices")
    if args.processes > 1 and not args.ray:
        parser.error("--processes is for groups on --ray")
    if args.devices and args.devices % args.processes:
        parser.error(f"{args.devices} devices do not divide over {args.processes} processes")
    common.fake_devices(max(args.stages * (args.devices or 1), *(groups for groups, _ in PLANS)))
    step = gpt_step(args.layers, args.stages, args.microbatches)
    if args.devices:
        print_devices(args, step)
        return
    if args.scanned:
        print_scanned(args)
        return
    if args.xla:
        with mesh_of(args.stages) as mesh:
            print(mpmd.jit(step.fun, mpmd_mesh=mesh).compile(*step.args).report())
        return
    print_passes(args, measure(step, args.repetitions))
    print_growth(args)
    print_plans(args.repetitions)


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step over ``groups`` groups, and arguments as ``ShapeDtypeStruct``s."""

    fun: object
    args: tuple
    groups: int


def gpt_step(num_layers: int, num_stages: int, num_microbatches: int) -> Step:
    config = gpt.GPTConfig(num_layers, D_MODEL, HEADS, SEQ_LEN, num_stages)
    params = jax.eval_shape(functools.partial(gpt.init_params, config=config), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((num_microbatches, BATCH, SEQ_LEN), jnp.int32)
    return train_step(functools.partial(gpt.loss, config=config), params, batch, num_stages)


def scanned_step(num_layers: int, num_stages: int, num_microbatches: int) -> Step:
    """The same model with its blocks in one scan over stacked weights."""
    config = gpt.GPTConfig(num_layers, D_MODEL, HEADS, SEQ_LEN, num_stages)

    def init(key):
        params = gpt.init_params(key, config)
        return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])}

    def loss(params, tokens, targets):
        def body(x, block):
            return mpmd.mark_stage_end(gpt.block(block, x, HEADS), num_stages=num_stages), None

        x = params["token_embedding"][tokens] + params["position_embedding"]
        x, _ = jax.lax.scan(body, x, params["blocks"])
        scores = gpt.layer_norm(params["head_norm"], x) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    batch = jax.ShapeDtypeStruct((num_microbatches, BATCH, SEQ_LEN), jnp.int32)
    return train_step(loss, jax.eval_shape(init, jax.random.key(0)), batch, num_stages)


def tiny_step(num_stages: int, num_microbatches: int) -> Step:
    """One small matrix per stage: all that is left is the plan."""

    def loss(params, x, y):
        for weight in params[:-1]:
            x = mpmd.mark_stage_end(jnp.tanh(x @ weight))
        return jnp.mean((x @ params[-1] - y) ** 2)

    params = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * num_stages
    batch = jax.ShapeDtypeStruct((num_microbatches, BATCH, 4), jnp.float32)
    return train_step(loss, params, batch, num_stages)


def train_step(loss, params, batch, num_stages: int) -> Step:
    schedule = mpmd.Std1F1B(num_stages)

    def step(state, xs, ys):
        params, opt_state = state
        loss_and_gradients = jax.value_and_grad(loss)
        total, gradients = mpmd.treduce(
            lambda microbatch: loss_and_gradients(params, *microbatch),
            (xs, ys),
            schedule=schedule,
            operation=mpmd.Add,
        )
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), total / len(xs)

    state = params, jax.eval_shape(OPTIMIZER.init, params)
    return Step(step, (state, batch, batch), num_stages)


def mesh_of(groups: int, devices: int = 1) -> mpmd.MpmdMesh:
    return common.open_mesh({"stage": groups, "data": devices}, on_ray=False)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Median seconds of each pass, and of ``jax.make_jaxpr`` alone; and what the step came to."""

    seconds: dict[str, float]
    make_jaxpr: float
    equations: int
    instructions: int
    executables: int

    @property
    def total(self) -> float:
        """All but XLA."""
        return sum(self.seconds.values())

    @property
    def own(self) -> float:
        """All but XLA and the user's function under JAX."""
        return self.total - self.seconds["jax"]


def measure(step: Step, repetitions: int) -> Measurement:
    mesh = mesh_of(step.groups)
    runs, traces = [], []
    for _ in range(repetitions):
        traces.append(seconds_of_make_jaxpr(step))
        compiled, seconds = compile_and_export(step, mesh)
        runs.append(seconds)
    program, traced = compiled.program, compiled.step
    return Measurement(
        {name: statistics.median(run[name] for run in runs) for name in runs[0]},
        statistics.median(traces),
        sum(map(len, (*traced.outside, *(loop.eqns for loop in traced.loops)))),
        sum(len(group.instructions) for group in program.plan.programs),
        len(program.plan.executables),
    )


def seconds_of_make_jaxpr(step: Step) -> float:
    forget()
    start = time.perf_counter()
    jax.make_jaxpr(step.fun)(*step.args)
    return time.perf_counter() - start


def compile_and_export(step: Step, mesh: GroupMesh) -> tuple[CompiledStep, dict[str, float]]:
    """All that the driver does before the groups, Ray actors say, compile their executables."""
    forget()
    donated = [False] * len(jax.tree.leaves(step.args))
    compiled = compile_step(
        CompileRequest(step.fun, step.args, {}, submeshes=mesh.abstract_submeshes, donated=donated)
    )
    watch = Stopwatch(dict(compiled.seconds))
    for executable in compiled.program.plan.executables:
        with watch("export"):
            function = compiled.program.functions[executable.name]
            export_function(function, executable, mesh.abstract_submeshes[0], mesh.platform)
    return compiled, watch.seconds


def print_devices(args: argparse.Namespace, step: Step) -> None:
    """Prints the time to load a step on groups of one and of several devices, data parallel.

    Processor time is that of this process; on Ray the groups, each with a share of the cores, have theirs.
    """
    print(
        f"{'devices':>7}{'seconds':>9}{'of processors':>15}{'export':>8}{'resolve':>9}{'load':>7}{'XLA':>7}"
    )
    for devices in (1, args.devices):
        with groups_of(args, devices) as mesh:
            runs = [seconds_to_load(step, mesh) for _ in range(args.repetitions)]
        medians = [statistics.median(column) for column in zip(*runs, strict=True)]
        wall, processors, export, resolve, load, xla = medians
        print(
            f"{devices:7}{wall:9.1f}{processors:15.1f}{export:8.1f}{resolve:9.1f}{load:7.1f}{xla:7.1f}",
            flush=True,
        )


def groups_of(args: argparse.Namespace, devices: int):
    """A mesh of groups of so many devices. On Ray, nothing that is compiled is kept for a later time."""
    if not args.ray:
        return mesh_of(args.stages, devices)
    import cluster  # here, because all else needs no Ray

    shape = {"stage": args.stages, "data": devices}
    processes = args.processes if devices > 1 else 1
    return cluster.launch(
        shape, "stage", processes_per_group=processes, compilation_cache=None, timeout=LAUNCH_SECONDS
    )


def seconds_to_load(step: Step, mesh: GroupMesh) -> tuple[float, ...]:
    """Seconds in all, of this process's processors, of phases, and of XLA on the group that took longest."""
    forget()
    start, start_of_processors = time.perf_counter(), time.process_time()
    rows = PartitionSpec(None, "data")
    function = mpmd.jit(step.fun, mpmd_mesh=mesh, in_shardings=(PartitionSpec(), rows, rows))
    report = function.compile(*step.args).report()
    total = time.perf_counter() - start, time.process_time() - start_of_processors
    phases = (report.seconds.get(name, 0.0) for name in ("export", "resolve", "load"))
    return *total, *phases, max(group.xla_seconds for group in report.groups)


def forget() -> None:
    jax.clear_caches()
    gc.collect()


def print_passes(args: argparse.Namespace, result: Measurement) -> None:
    print(
        f"{args.layers} layers, {args.stages} stages, {args.microbatches} microbatches: "
        f"{result.equations} equations become {result.executables} executables and "
        f"{result.instructions} instructions\n"
    )
    rows = [*result.seconds.items(), ("all but XLA", result.total), ("all but XLA and jax", result.own)]
    print(f"{'pass':20}{'seconds':>9}{'of make_jaxpr':>15}")
    for name, seconds in rows:
        print(f"{name:20}{seconds:9.2f}{seconds / result.make_jaxpr:15.0%}")
    print(f"{'jax.make_jaxpr':20}{result.make_jaxpr:9.2f}\n")


def print_growth(args: argparse.Namespace) -> None:
    stages = min(args.stages, *LAYERS)
    print(f"How the time grows, with {stages} stages; own: all but XLA and jax")
    sizes = [(layers, args.microbatches) for layers in LAYERS]
    sizes += [(args.layers, microbatches) for microbatches in MICROBATCHES]
    for i, (layers, microbatches) in enumerate(sizes):
        result = measure(gpt_step(layers, stages, microbatches), args.repetitions)
        columns = {**result.seconds, "own": result.own}
        if not i:
            heading = f"{'layers':>6}{'microbatches':>14}{'equations':>11}{'instructions':>14}"
            print(heading + "".join(f"{name:>8}" for name in columns) + f"{'own/equation':>15}")
        numbers = f"{layers:6}{microbatches:14}{result.equations:11}{result.instructions:14}"
        seconds = "".join(f"{value:8.2f}" for value in columns.values())
        print(f"{numbers}{seconds}{result.own / result.equations * 1e6:12.0f} us", flush=True)
    print()


def print_scanned(args: argparse.Namespace) -> None:
    """The time to compile few and many layers of one scan; XLA's, once, on the group that took longest."""
    print(f"{'layers':>6}{'all but XLA':>13}{'own':>8}{'XLA':>8}{'executables':>13}{'equations':>11}")
    totals = []
    for layers in SCANNED_LAYERS:
        step = scanned_step(layers, args.stages, args.microbatches)
        result = measure(step, args.repetitions)
        xla = xla_seconds(step)
        totals.append(result.total + xla)
        numbers = (
            f"{result.total:13.2f}{result.own:8.2f}{xla:8.2f}{result.executables:13}{result.equations:11}"
        )
        print(f"{layers:6}{numbers}", flush=True)
    few, many = SCANNED_LAYERS
    print(f"{many} layers take {totals[1] / totals[0]:.2f} times as long as {few}")


def xla_seconds(step: Step) -> float:
    forget()
    with mesh_of(step.groups) as mesh:
        report = mpmd.jit(step.fun, mpmd_mesh=mesh).compile(*step.args).report()
    return max(group.xla_seconds for group in report.groups)


def print_plans(repetitions: int) -> None:
    print("Large plans of a tiny model, in seconds: all but XLA, export and jax")
    print(f"{'groups':>6}{'microbatches':>14}{'instructions':>14}{'seconds':>9}{'per instruction':>17}")
    for groups, microbatches in PLANS:
        result = measure(tiny_step(groups, microbatches), repetitions)
        seconds = result.own - result.seconds["export"]
        print(
            f"{groups:6}{microbatches:14}{result.instructions:14}{seconds:9.2f}"
            f"{seconds / result.instructions * 1e6:14.0f} us",
            flush=True,
        )


if __name__ == "__main__":
    main()
