"""JaxPP's tutorial: a flax transformer with AdamW, by FSDP, then as four stages and as eight on four groups.

    python examples/jaxpp_tutorial.py              in one process, on four fake devices
    python examples/jaxpp_tutorial.py --ray        on four Ray actors
    python examples/jaxpp_tutorial.py --data 2 --model 2     groups of four devices

The train steps and the loop that times them are the tutorial's, in the names of ``mpmd``. Losses, gradients
and parameters of the pipelines are compared with those of FSDP, which is plain ``jax.jit`` on four devices,
and what the groups run with the task lists that the tutorial prints.
"""

import argparse
import functools
import math
import pathlib
import time

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxpp_checks
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd

NUM_GROUPS = jaxpp_checks.NUM_GROUPS
WARM_UP_STEPS = 2
LEARNING_RATE = 1e-3
COLUMN_PARALLEL = ("query", "key", "value", "Dense_0")
ROW_PARALLEL = ("out", "Dense_1")


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    axes = {"stage": NUM_GROUPS, "fsdp": args.data, "model": args.model}
    common.fake_devices(NUM_GROUPS if args.ray else math.prod(axes.values()))
    xs, targets = make_data(args)
    with common.open_mesh(axes, args.ray, args.address, args.processes, args.transport) as mesh:
        print_mesh(mesh)
        params = init_params(args)
        print(f"\nFSDP by jax.jit on {NUM_GROUPS} devices")
        results = {"FSDP by jax.jit": train_fsdp(args, make_state(args, NUM_GROUPS, params), xs, targets)}
        for num_stages in dict.fromkeys((NUM_GROUPS, args.layers)):
            print(f"\n{num_stages} stages on {NUM_GROUPS} groups")
            state = make_state(args, num_stages, params)
            step = pipelined(args, mesh, num_stages, state, xs, targets)
            timeline = args.output / f"timeline_of_{num_stages}_stages.json"
            profiled = functools.partial(profile, step, trace_folder(args), timeline)
            result = train(step, profiled, (state, xs, targets), args)
            results[f"{num_stages} stages"] = result
            jaxpp_checks.check_placement(result.state, mesh, args, num_stages)
            jaxpp_checks.print_program(step)
            jaxpp_checks.check_tasks(step, args, num_stages)
            jaxpp_checks.check_parity(result, results["FSDP by jax.jit"])
    timed = args.steps - WARM_UP_STEPS - 1
    print(f"\nseconds for {timed} steps of {args.batch_size} sequences in {args.microbatches} microbatches")
    for name, result in results.items():
        print(f"{name:>16}  {result.seconds:.3f}")


def print_mesh(mesh) -> None:
    """The whole mesh and each group's submesh; on Ray, the process and the devices of each."""
    print(mesh)
    for group in getattr(mesh, "unstack", None) or mesh.processes:
        print(group)


class Block(nn.Module):
    """Attention and a feed-forward network, rematerialized in the backward pass."""

    num_heads: int

    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x):
        d_model = x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(self.num_heads, qkv_features=d_model // 8)
        x = nn.LayerNorm()(x + attention(x))
        hidden = nn.gelu(nn.Dense(4 * d_model)(x))
        return nn.LayerNorm()(x + nn.Dense(d_model)(hidden))


class Transformer(nn.Module):
    """Blocks over float32[batch, seq_len, d_model], ``num_layers / num_stages`` of them to a stage."""

    num_layers: int
    num_stages: int
    num_heads: int

    @nn.compact
    def __call__(self, x):
        for layer in range(self.num_layers):
            x = Block(self.num_heads, name=f"block_{layer}")(x)
            if (layer + 1) % (self.num_layers // self.num_stages) == 0:
                x = mpmd.mark_stage_end(x)
        return x


def make_data(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, each float32[batch_size, seq_len, d_model]."""
    rng = np.random.default_rng(0)
    shape = (2, args.batch_size, args.seq_len, args.d_model)
    xs, targets = rng.standard_normal(shape, dtype=np.float32)
    return xs, targets


def init_params(args: argparse.Namespace) -> dict:
    """The parameters, which are the same for any number of stages."""
    model = Transformer(args.layers, NUM_GROUPS, args.heads)
    x = jnp.ones((1, args.seq_len, args.d_model))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    print(f"model: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters in {args.layers} layers")
    return params


def make_state(args: argparse.Namespace, num_stages: int, params: dict) -> TrainState:
    model = Transformer(args.layers, num_stages, args.heads)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(LEARNING_RATE))


def loss_fn(params, apply_fn, x, targets):
    """Mean squared error of one microbatch, whose rows are sharded over ``"fsdp"``."""
    x, targets = jax.lax.with_sharding_constraint((x, targets), P("fsdp"))
    return jnp.mean((apply_fn({"params": params}, x) - targets) ** 2)


def train_step(state: TrainState, xs, targets, num_microbatches: int, schedule):
    """One step of AdamW; returns the new state and the sum of the microbatches' losses."""

    def loss_and_gradients(microbatch):
        return jax.value_and_grad(loss_fn)(state.params, state.apply_fn, *microbatch)

    loss, gradients = mpmd.treduce(
        loss_and_gradients,
        mpmd.microbatches((xs, targets), num_microbatches),
        schedule=schedule,
        operation=mpmd.Add,
    )
    return state.apply_gradients(grads=gradients), loss


def accumulating_step(state: TrainState, xs, targets, num_microbatches: int):
    """The same in plain JAX, with a scan over the microbatches, as the tutorial begins."""

    def add_microbatch(carry, microbatch):
        found = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, *microbatch)
        return jax.tree.map(jnp.add, carry, found), ()

    cut = [array.reshape(num_microbatches, -1, *array.shape[1:]) for array in (xs, targets)]
    zeros = jax.tree.map(jnp.zeros_like, (0.0, state.params))
    (loss, gradients), _ = jax.lax.scan(add_microbatch, zeros, cut)
    return state.apply_gradients(grads=gradients), loss


def train_fsdp(args: argparse.Namespace, state: TrainState, xs, targets) -> jaxpp_checks.Result:
    """Trains by plain ``jax.jit`` on four devices, which share the first dimension of everything."""
    mesh = jax.make_mesh(
        (NUM_GROUPS,), ("fsdp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:NUM_GROUPS]
    )
    specs = jax.tree.map(lambda leaf: P("fsdp") if np.ndim(leaf) else P(), state)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), (specs, P("fsdp"), P("fsdp")))
    print(f"{mesh}\n{args.microbatches} microbatches")
    inputs = jax.device_put((state, xs, targets), shardings)
    step = functools.partial(accumulating_step, num_microbatches=args.microbatches)
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(step, in_shardings=shardings, out_shardings=(shardings[0], NamedSharding(mesh, P())))
            .lower(*inputs)
            .compile()
        )
        return train(compiled, functools.partial(trace, compiled, trace_folder(args)), inputs, args)


def spec_of(path: tuple, leaf) -> P:
    """Every array is sharded over ``"fsdp"`` (ZeRO 3), and heads and hidden units over ``"model"``.

    The first matrix of attention and of the feed-forward network is split by columns, the second by rows.
    """
    if not np.ndim(leaf):
        return P()
    layer, kind = (key.key for key in path[-2:])
    if layer in COLUMN_PARALLEL:
        return P("fsdp", "model") if kind == "kernel" else P(("model", "fsdp"))
    if layer in ROW_PARALLEL and kind == "kernel":
        return P(("model", "fsdp"))
    return P("fsdp")


def pipelined(args: argparse.Namespace, mesh, num_stages: int, state: TrainState, xs, targets):
    """The step compiled for the groups of ``mesh``."""
    schedule = mpmd.Interleaved1F1B(num_stages=num_stages, mpmd_dim=NUM_GROUPS)
    state_specs = jax.tree_util.tree_map_with_path(spec_of, state)
    return mpmd.jit(
        functools.partial(train_step, num_microbatches=args.microbatches, schedule=schedule),
        mpmd_mesh=mesh,
        in_shardings=(state_specs, P("fsdp"), P("fsdp")),
        out_shardings=(state_specs, P()),
    ).compile(state, xs, targets)


def train(step, profiled, inputs: tuple, args: argparse.Namespace) -> jaxpp_checks.Result:
    """The tutorial's loop: two steps to warm up, then those that are timed, then one under JAX's profiler.

    The last one is ``profiled``, with the arguments and the result of ``step``.
    """
    state, xs, targets = inputs
    losses = []
    for _ in range(WARM_UP_STEPS):
        state, loss = step(state, xs, targets)
        losses.append(loss)
    jax.block_until_ready(state)

    start = time.perf_counter()
    for index in range(WARM_UP_STEPS, args.steps - 1):
        state, loss = step(state, xs, targets)
        losses.append(loss)
        if index % 2 == 1:
            print(f"Training loss after step {index + 1}: {loss}")
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start

    state, loss = profiled(state, xs, targets)
    losses.append(loss)
    print(f"Final training loss: {loss}")
    print(f"Training took: {seconds:.2f} seconds")
    return jaxpp_checks.Result(state, [float(loss) for loss in losses], seconds)


def trace_folder(args: argparse.Namespace) -> pathlib.Path:
    return args.output / "tutorial-trace"


def trace(step, folder: pathlib.Path, *inputs):
    """Runs a step of plain JAX under JAX's profiler."""
    with jax.profiler.trace(folder):
        return jax.block_until_ready(step(*inputs))


def profile(step, folder: pathlib.Path, timeline: pathlib.Path, *inputs):
    """The same for a pipeline, with the profilers of all processes; also writes when each group did what."""
    result, events = step.profile(*inputs, trace_dir=folder)
    mpmd.render.chrome_trace(events, timeline)
    print(f"{len(events)} tasks and waits are in {timeline}, the traces of all processes in {folder}")
    return result


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common.add_mesh_arguments(parser)
    common.add_group_arguments(parser)
    add = parser.add_argument
    add("--layers", type=int, default=8, help="a multiple of 4; the tutorial has 8")
    add("--d-model", type=int, default=64, help="the tutorial has 1024")
    add("--heads", type=int, default=8)
    add("--seq-len", type=int, default=32, help="the tutorial has 2048")
    add("--batch-size", type=int, default=8)
    add("--microbatches", type=int, default=4)
    add("--steps", type=int, default=6, help="two of them to warm up, and one under the profiler")
    add("--output", type=pathlib.Path, default=pathlib.Path("demo_output/jaxpp"), help="for profiles")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    common.check_group_arguments(parser, args, args.ray)
    if args.layers % NUM_GROUPS:
        parser.error(f"--layers {args.layers} is not a multiple of {NUM_GROUPS}")
    if args.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}: one to be timed, one to be profiled")
    if args.heads % NUM_GROUPS or args.d_model % (NUM_GROUPS * 8) or args.batch_size % NUM_GROUPS:
        parser.error(f"FSDP shards --heads, --d-model / 8 and --batch-size over {NUM_GROUPS} devices")
    if args.batch_size % (args.microbatches * args.data):
        parser.error("--batch-size is not a multiple of --microbatches times --data")
    if args.heads % (args.data * args.model):
        parser.error("--heads is not a multiple of --data times --model")
    if args.d_model % (8 * args.heads):
        parser.error("--d-model is not a multiple of 8 times --heads")
    return args


if __name__ == "__main__":
    main()
