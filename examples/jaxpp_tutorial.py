"""JaxPP's tutorial: a flax transformer with AdamW, first as four stages, then as eight, on four groups.

    python examples/jaxpp_tutorial.py              in one process, on four fake devices
    python examples/jaxpp_tutorial.py --ray        on four Ray actors
    python examples/jaxpp_tutorial.py --data 2 --model 2     groups of four devices

The train step is the tutorial's; only the imports changed. Losses, gradients and parameters are compared
with plain ``jax.jit`` of the same step, and the schedules with the task lists that the tutorial prints.
"""

import argparse
import functools
import math

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import mpmd

NUM_GROUPS = 4
LEARNING_RATE = 1e-3
COLUMN_PARALLEL = ("query", "key", "value", "Dense_0")
ROW_PARALLEL = ("out", "Dense_1")

# What the tutorial prints: (stages, group) -> the group's tasks for four microbatches.
TUTORIAL_TASKS = {
    (4, 2): "fwd_2__0 fwd_2__1 fwd_2__2 bwd_2__0 fwd_2__3 bwd_2__1 bwd_2__2 bwd_2__3",
    (4, 3): " ".join(f"FusedTask(fwd_3__{i}, bwd_3__{i})" for i in range(4)),
    (8, 0): "fwd_0__0 fwd_0__1 fwd_0__2 fwd_0__3 fwd_4__0 fwd_4__1 fwd_4__2 fwd_4__3 "
    "bwd_4__0 bwd_4__1 bwd_4__2 bwd_4__3 bwd_0__0 bwd_0__1 bwd_0__2 bwd_0__3",
    (8, 3): "fwd_3__0 fwd_3__1 fwd_3__2 fwd_3__3 "
    + " ".join(f"FusedTask(fwd_7__{i}, bwd_7__{i})" for i in range(4))
    + " bwd_3__0 bwd_3__1 bwd_3__2 bwd_3__3",
}


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    axes = {"stage": NUM_GROUPS, "fsdp": args.data, "model": args.model}
    if not args.ray:
        common.fake_devices(math.prod(axes.values()))
    xs, targets = make_data(args)
    with common.open_mesh(axes, args.ray, args.address, args.processes) as mesh:
        params = init_params(args)
        reference = train(plain_jax(args), make_state(args, NUM_GROUPS, params), xs, targets, args.steps)
        for num_stages in (NUM_GROUPS, args.layers):
            print(f"\n{num_stages} stages on {NUM_GROUPS} groups")
            state = make_state(args, num_stages, params)
            step = pipelined(args, mesh, num_stages, state, xs, targets)
            result = train(step, state, xs, targets, args.steps)
            check_placement(result[0], args.layers, num_stages)
            check_parity(result, reference)
    check_task_lists()


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
                x = mpmd.pipeline_enter_stage(x)
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
    return jax.jit(model.init)(jax.random.key(0), x)["params"]


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


def bind(args: argparse.Namespace, num_stages: int):
    """``train_step`` with the schedule of so many stages."""
    schedule = mpmd.Interleaved1F1B(num_stages=num_stages, mpmd_dim=NUM_GROUPS)
    return functools.partial(train_step, num_microbatches=args.microbatches, schedule=schedule)


def plain_jax(args: argparse.Namespace):
    """The step on one device, where ``treduce`` is a scan and a mark the identity."""
    step = jax.jit(bind(args, NUM_GROUPS))

    def run(*inputs):
        with jax.set_mesh(jax.make_mesh((1,), ("fsdp",), (jax.sharding.AxisType.Auto,))):
            return step(*inputs)

    return run


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
    state_specs = jax.tree_util.tree_map_with_path(spec_of, state)
    return mpmd.mpmd_jit_with_loop(
        bind(args, num_stages),
        mpmd_mesh=mesh,
        in_specs=(state_specs, P("fsdp"), P("fsdp")),
        out_specs=(state_specs, P()),
    ).compile(state, xs, targets)


def train(step, state: TrainState, xs, targets, num_steps: int):
    """The state after some steps, and the loss of each."""
    losses = []
    for _ in range(num_steps):
        state, loss = step(state, xs, targets)
        losses.append(loss)
    return state, [float(loss) for loss in losses]


def check_placement(state: TrainState, num_layers: int, num_stages: int) -> None:
    """Stage ``s`` lives on group ``s % NUM_GROUPS``; the step counters on all groups."""
    count = state.opt_state[0].count
    print("step", state.step)
    print("Adam's count", count)
    assert count.mpmd_idxs == state.step.mpmd_idxs == tuple(range(NUM_GROUPS)), count.mpmd_idxs
    for layer in range(num_layers):
        kernel = state.params[f"block_{layer}"]["Dense_0"]["kernel"]
        print(f"block_{layer}", kernel)
        stage = layer // (num_layers // num_stages)
        assert kernel.mpmd_idxs == (stage % NUM_GROUPS,), kernel.mpmd_idxs


def check_parity(actual, expected) -> None:
    """Compares losses, gradients and parameters after some steps with those of plain ``jax.jit``.

    AdamW divides by the size of the gradient: where that is mere rounding (the key's bias has no effect
    on softmax, so its gradient is zero) the first steps go either way by a whole learning rate. Adam's
    first moment is a weighted sum of all gradients, so it tells what the gradients were; the parameters
    are compared where the second moment, 1e-3 of the gradient's square, shows gradients of 1e-3 or more.
    Rounding, some 1e-6, then changes an update by a thousandth of the learning rate.
    """
    (state, losses), (expected_state, expected_losses) = actual, expected
    for index, pair in enumerate(zip(losses, expected_losses, strict=True)):
        print(f"step {index + 1}: loss {pair[0]:.6f} in the pipeline, {pair[1]:.6f} in plain jax.jit")
    moments, expected_moments = state.opt_state[0], expected_state.opt_state[0]

    def where_significant(params):
        return jax.tree.map(
            lambda p, nu: np.where(np.asarray(nu) > 1e-9, np.asarray(p), 0), params, expected_moments.nu
        )

    assert int(state.step) == int(expected_state.step)
    common.assert_close("losses", losses, expected_losses, 2e-5)
    common.assert_close("gradients (first moments)", moments.mu, expected_moments.mu, 1e-6)
    params, expected_params = where_significant(state.params), where_significant(expected_state.params)
    common.assert_close("parameters", params, expected_params, 2e-5)


def check_task_lists() -> None:
    """Compares the schedules with what the tutorial prints."""
    print()
    for (num_stages, group), expected in TUTORIAL_TASKS.items():
        tasks = mpmd.Interleaved1F1B(num_stages=num_stages, mpmd_dim=NUM_GROUPS).tasks(4)[group]
        actual = " ".join(map(str, tasks))
        print(f"{num_stages} stages, group {group}: {actual}")
        assert actual == expected, expected
    print("the task lists are the tutorial's")


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
    add("--steps", type=int, default=3)
    args = parser.parse_args(argv)
    common.check_group_arguments(parser, args, args.ray)
    if args.layers % NUM_GROUPS:
        parser.error(f"--layers {args.layers} is not a multiple of {NUM_GROUPS}")
    if args.batch_size % (args.microbatches * args.data):
        parser.error("--batch-size is not a multiple of --microbatches times --data")
    if args.heads % (args.data * args.model):
        parser.error("--heads is not a multiple of --data times --model")
    if args.d_model % (8 * args.heads):
        parser.error("--d-model is not a multiple of 8 times --heads")
    return args


if __name__ == "__main__":
    main()
