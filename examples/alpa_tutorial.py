"""Alpa's tutorial: a flax MLP with adam, with stages set by hand, with devices set for each, and chosen.

    python examples/alpa_tutorial.py              in one process, on four fake devices
    python examples/alpa_tutorial.py --ray        on Ray actors

Each part is one step, compared with the step on a single device as the tutorial does. The automatic part
measures this machine, or the Ray cluster, chooses for it, prints the table, and runs the choice. The devices
are slices of few cores, so one of them may be the best: then the best pipeline is planned and run, too. The
last part plans the tutorial's own sizes for two nodes of four GPUs, without any. ``--full`` also runs them:
268 MB of weights, of which each part holds a dozen copies, and some minutes on a few cores.
"""

import argparse
import functools
import itertools
import time

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.simulate import Link

NUM_STAGES = 2
NUM_MICROBATCHES = 16
RELATIVE_LIMIT = 1e-4  # of each leaf's norm; the tutorial's own limit, of differences, is 5e-3

# Alpa's `submesh_physical_shapes=[(1, 2), (1, 1)]`: two devices for the first stage, one for the second.
DEVICES_OF_STAGES = [{"data": 2}, {"data": 1}]

NUM_DEVICES = 4
# What --given takes in place of a measured cluster: one that no machine is exactly like.
GIVEN_CLUSTER = mpmd.Cluster(
    nodes=1,
    devices_per_node=NUM_DEVICES,
    memory=1e9,
    flops=2e10,
    memory_bandwidth=5e9,
    device_link=Link(1e-4, 1e9),
    node_link=Link(),
    task_overhead=3e-5,
    alone=4.0,
)

OPTIMIZER = optax.adam(1e-3)

TUTORIAL_DIM = TUTORIAL_BATCH_SIZE = 2048
# Two machines of four V100, by data sheets: float32 products, one NVLink between devices, 10 Gbit/s Ethernet.
TUTORIAL_CLUSTER = mpmd.Cluster(
    nodes=2,
    devices_per_node=4,
    memory=16e9,
    flops=15.7e12,
    memory_bandwidth=900e9,
    device_link=Link(5e-6, 25e9),
    node_link=Link(2e-5, 1.25e9),
    task_overhead=2e-5,
)


class MLP(nn.Module):
    """Four linear layers with ReLUs; with ``boundary`` the second ends a pipeline stage."""

    dim: int
    boundary: bool = False

    @nn.compact
    def __call__(self, x):
        for index, features in enumerate((4 * self.dim, self.dim, 4 * self.dim, self.dim)):
            x = nn.relu(nn.Dense(features)(x))
            if self.boundary and index == 1:
                x = mpmd.mark_stage_end(x)
        return x


def single_device_step(state: TrainState, batch: dict) -> TrainState:
    """The tutorial's first step, in plain JAX."""

    def loss(params):
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def train_step(state: TrainState, batch: dict, schedule: mpmd.Schedule | None = None) -> TrainState:
    """The same with ``mpmd.grad``, of a batch that is an argument of the loss, so that it can be cut.

    Without a schedule ``mpmd.plan`` decides on it, and on stages if the model has no boundary.
    """

    def loss(params, batch):
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    gradients = mpmd.grad(loss, num_microbatches=NUM_MICROBATCHES, schedule=schedule)(state.params, batch)
    return state.apply_gradients(grads=gradients)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not args.ray:
        common.fake_devices(NUM_DEVICES)
    with common.ray_connection(args.ray, args.address):
        for name in args.parts:
            title, part = PARTS[name]
            print(f"\n# {title}\n")
            part(args)


def manual_stages(args: argparse.Namespace) -> None:
    """``layer_option="manual"``: the model's boundary, and a device for each stage."""
    run_marked(args, [{"data": 1}] * NUM_STAGES)


def manual_devices(args: argparse.Namespace) -> None:
    """``ManualStageOption``: devices for each stage."""
    run_marked(args, DEVICES_OF_STAGES)


def run_marked(args: argparse.Namespace, groups: list[dict]) -> None:
    """The step of a model with a boundary, on groups of these shapes."""
    state, batch = make_state(args.dim, boundary=True), make_batch(args)
    step = functools.partial(train_step, schedule=mpmd.Std1F1B(NUM_STAGES))
    with common.open_groups(groups, args.ray, args.transport) as mesh:
        step = mpmd.jit(step, mesh, in_shardings=(P(), P("data"))).compile(state, batch)
        print(step.report())
        assert_parity(step(state, batch), args)


def automatic(args: argparse.Namespace) -> None:
    """``AutoLayerOption`` and ``stage_option="auto"``: layers, stages and devices, all chosen."""
    devices = GIVEN_CLUSTER if args.given else common.measured_cluster(args.ray, NUM_DEVICES)
    print(devices)
    choice = choose(args, devices)
    run_choice(choice, args)
    if len(choice.launch["groups"]) == 1:
        print("\nA pipeline does not pay here. The best one nevertheless:\n")
        run_choice(choose(args, devices, groups=NUM_STAGES), args)


def choose(args: argparse.Namespace, cluster: mpmd.Cluster, **fixed) -> mpmd.Choice:
    state, batch = make_state(args.dim), make_batch(args)
    limits = {"simulate": args.simulate, "seconds": 300, "num_layers": args.num_layers}
    return mpmd.plan(train_step, state, batch, cluster=cluster, **limits, **fixed)


def run_choice(choice: mpmd.Choice, args: argparse.Namespace) -> None:
    """Runs what was chosen, on groups of the chosen shapes."""
    print_choice(choice)
    state, batch = make_state(args.dim), make_batch(args)
    with common.open_groups(choice.launch["groups"], args.ray, args.transport) as mesh:
        step = choice.jit(mesh, donate_argnums=())
        state = step(state, batch)
        assert_parity(state, args)
        start = time.perf_counter()
        for _ in range(args.steps):
            state = step(state, batch)
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - start) / args.steps
    predicted = choice.best.prediction.seconds
    print(
        f"{seconds * 1e3:.1f} ms for a step here, {predicted * 1e3:.1f} ms predicted: "
        f"predicted / measured = {predicted / seconds:.2f}"
    )


def tutorial_cluster(args: argparse.Namespace) -> None:
    """The tutorial's sizes and a cluster as in its text, of shapes alone."""
    state = jax.eval_shape(lambda: make_state(TUTORIAL_DIM))
    rows = jax.ShapeDtypeStruct((TUTORIAL_BATCH_SIZE, TUTORIAL_DIM), jnp.float32)
    batch = {"x": rows, "y": rows}
    limits = {"simulate": args.simulate, "seconds": 300, "num_layers": args.num_layers}
    print_choice(mpmd.plan(train_step, state, batch, cluster=TUTORIAL_CLUSTER, **limits))


def print_choice(choice: mpmd.Choice) -> None:
    """The tables of candidates and of stages; then what Alpa prints: layers of each stage, and submeshes."""
    profile = choice.stage_profile()
    print(f"{choice}\n\n{profile}\n")
    assert len(profile.chosen) == len(choice.candidate.layers_per_stage), profile.chosen
    layers = choice.candidate.layers_per_stage
    seconds = choice.best.prediction.stage_seconds
    for stage, stop in enumerate(itertools.accumulate(layers)):
        ids = [*range(stop - layers[stage], stop)]
        print(f"stage {stage}: layers {ids}, {seconds[stage] * 1e3:.3f} ms for a microbatch")
    for group, axes in enumerate(choice.launch["groups"]):
        print(f"group {group}: {axes}")


def make_state(dim: int, boundary: bool = False) -> TrainState:
    """The same parameters with and without the boundary."""
    model = MLP(dim, boundary)
    params = MLP(dim).init(jax.random.key(0), jnp.zeros((1, dim)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)


def make_batch(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Noisy values of a linear function: ``x`` and ``y``, each float32[batch_size, dim]."""
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((args.dim, args.dim)), rng.standard_normal(args.dim)
    x, noise = rng.standard_normal((2, args.batch_size, args.dim))
    return {"x": np.float32(x), "y": np.float32(x @ w + b + 0.1 * noise)}


def assert_parity(actual: TrainState, args: argparse.Namespace) -> None:
    """Compares a step with that of a single device."""
    expected = jax.jit(single_device_step)(make_state(args.dim), make_batch(args))
    for name in ("params", "opt_state"):
        common.assert_close(name, getattr(actual, name), getattr(expected, name), RELATIVE_LIMIT)


PARTS = {
    "manual": ("manual stages", manual_stages),
    "devices": ("manual stages with devices for each", manual_devices),
    "auto": ("automatic layers and stages", automatic),
    "gpus": ("two nodes of four GPUs", tutorial_cluster),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common.add_mesh_arguments(parser)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="those to run; by default all")
    add("--dim", type=int, default=128, help="the tutorial has 2048 (default: 128)")
    add("--batch-size", type=int, default=256, help="the tutorial has 2048 (default: 256)")
    add("--given", action="store_true", help="choose for a cluster of given speeds; by default measured")
    add("--simulate", type=int, default=16, help="candidates of which the plans are simulated (default: 16)")
    add("--steps", type=int, default=10, help="steps of each choice that are timed (default: 10)")
    add("--num-layers", type=int, help="into how many layers the model is cut, of which stages consist")
    add("--full", action="store_true", help="the tutorial's sizes")
    args = parser.parse_args(argv)
    if args.full:
        args.dim, args.batch_size = TUTORIAL_DIM, TUTORIAL_BATCH_SIZE
    if args.batch_size % (2 * NUM_MICROBATCHES):
        parser.error(f"--batch-size must be a multiple of {2 * NUM_MICROBATCHES}")
    return args


if __name__ == "__main__":
    main()
