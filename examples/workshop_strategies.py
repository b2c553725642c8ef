"""The Workshop guide's strategies, planned and run for one transformer, and its troubleshooting.

    python examples/workshop_strategies.py              in one process, on eight fake devices
    python examples/workshop_strategies.py --ray        on Ray actors

    python examples/workshop_strategies.py --measure    times steps, and plans for the devices that are here
    python examples/workshop_strategies.py --strategies selected --memory 1.8e6    devices with less memory

A strategy is what ``mpmd.plan`` is told to keep to: the number of groups, the devices of a group along each
axis, or checkpointing; nothing, in the end, and then it selects one itself. The model does not know which.
Each step is compared with plain ``jax.jit`` on one device, and a table compares what is predicted of them.
What the guide says of strategies is asserted of those that ran (``workshop_claims.py``): of memory by what
was compiled, of time with ``--measure``.

Without it, the predictions are for two nodes of four devices as fast as ``CLUSTER`` says, where the sizes of
``--help`` take milliseconds. What runs are the same groups, on the devices that are here. A device has far
more memory than these sizes need; where it has less, another strategy is selected.
"""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping

import common
import gpt
import jax
import numpy as np
import optax
import workshop_claims
import workshop_measure
import workshop_troubleshooting
from workshop_measure import Result

import mpmd
from mpmd.simulate import Link

NUM_DEVICES = 8
ONE_DEVICE = "plain jax.jit"
LESS_MEMORY = 0.8  # of what the selected strategy needs
LIMIT = 1e-5  # of the relative error of a leaf
MOST_COMMUNICATION = 0.2  # of a step: the guide's limit

# Adam divides by the size of the gradient. Where that is but rounding, this epsilon hides it.
OPTIMIZER = optax.adamw(1e-2, eps=1e-4)

# Slow devices with fast links to their neighbours, so that a model which trains in seconds is worth dividing.
CLUSTER = mpmd.Cluster(
    nodes=2,
    devices_per_node=4,
    memory=1e9,
    flops=1e10,
    memory_bandwidth=1e10,
    device_link=Link(1e-6, 1e10),
    node_link=Link(1e-5, 1e9),
    task_overhead=1e-5,
)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The constraints of a strategy for ``mpmd.plan``.

    Attributes:
      fixed: its keyword arguments.
      checkpoint: what rematerializes parts of the loss; ``None`` leaves that to the plan.
      memory: the bytes of a device, where they are not the cluster's.
    """

    fixed: Mapping
    checkpoint: Callable | None = None
    memory: float | None = None


# Keeps what products with weights make, and computes attention's scores and weights again.
checkpoint_attention = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)
ONE_GROUP = {"groups": 1, "num_stages": 1, "remat": False, "fsdp": False}
PIPELINE = {**ONE_GROUP, "groups": 4, "num_stages": 4, "num_microbatches": 8}
STAGES_1F1B = {**PIPELINE, "submesh": {}, "schedule": mpmd.Std1F1B}
TWO_STAGES = {**STAGES_1F1B, "groups": 2, "num_stages": 2}
STRATEGIES = {
    "accumulation": Strategy({**ONE_GROUP, "submesh": {}, "num_microbatches": 4}),
    "data": Strategy({**ONE_GROUP, "submesh": {"data": 8}}),
    "FSDP": Strategy({**ONE_GROUP, "submesh": {"data": 8}, "fsdp": True}),
    "tensor": Strategy({**ONE_GROUP, "submesh": {"model": 4}}),
    "sequence": Strategy({**ONE_GROUP, "submesh": {"data": 2, "model": 2, "sequence": 2}}),
    "pipeline, GPipe": Strategy({**STAGES_1F1B, "schedule": mpmd.GPipe}),
    "pipeline, 1F1B": Strategy(STAGES_1F1B),
    "full checkpointing": Strategy({**STAGES_1F1B, "remat": True}),
    "selective checkpointing": Strategy(STAGES_1F1B, checkpoint_attention),
    "2D": Strategy({**PIPELINE, "submesh": {"data": 2}}),
    "3D": Strategy({**PIPELINE, "groups": 2, "num_stages": 2, "submesh": {"data": 2, "model": 2}}),
    # Beside them, what the guide's troubleshooting compares with them.
    "whole batch": Strategy({**ONE_GROUP, "submesh": {}, "num_microbatches": 1}),
    "tensor 8": Strategy({**ONE_GROUP, "submesh": {"model": 8}}),
    "data 4, tensor 2": Strategy({**ONE_GROUP, "submesh": {"data": 4, "model": 2}}),
    "16 microbatches": Strategy({**STAGES_1F1B, "num_microbatches": 16}),
    "4 microbatches": Strategy({**STAGES_1F1B, "num_microbatches": 4}),
    "2 stages": Strategy(TWO_STAGES),
    "selected": Strategy({}),
}


def with_less_memory(selected: Result) -> Strategy:
    return Strategy({}, memory=LESS_MEMORY * selected.choice.best.prediction.memory.total)


def imbalanced(stages: Result) -> Strategy:
    """All layers but one in the first stage."""
    count = sum(stages.choice.candidate.layers_per_stage)
    return Strategy({**TWO_STAGES, "layers_per_stage": (count - 1, 1)})


def rebalanced(stages: Result) -> Strategy:
    """Layers moved to the stage that was measured to be faster."""
    layers = stages.choice.candidate.layers_per_stage
    return Strategy(
        {**TWO_STAGES, "layers_per_stage": workshop_measure.balanced(layers, stages.stage_seconds)}
    )


# What is tried after a strategy, by what came out.
FOLLOWED_BY = {
    "selected": ("selected, less memory", with_less_memory),
    "2 stages": ("imbalanced", imbalanced),
    "imbalanced": ("rebalanced", rebalanced),
}


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not args.ray:
        common.fake_devices(NUM_DEVICES)
    config = gpt.GPTConfig(args.layers, args.d_model, args.heads, args.seq_len)
    # The state is on the host: a step takes over what is on devices.
    state, batch = jax.device_get(init(config)), make_batch(args)
    plain = jax.jit(functools.partial(train_step, config=config))
    expected = plain(state, *batch)
    results: dict[str, Result] = {}
    steps, seconds = {ONE_DEVICE: plain}, {}
    with common.ray_connection(args.ray, args.address), contextlib.ExitStack() as meshes:
        cluster = planned_cluster(args)
        for first in args.strategies:
            name, strategy = first, STRATEGIES[first]
            while name not in results:
                choice = choose(strategy, config, state, batch, cluster, args)
                mesh = meshes.enter_context(
                    common.open_groups(choice.launch["groups"], args.ray, args.transport)
                )
                step, result = run(name, choice, mesh, state, batch, expected, args)
                steps[name], results[name] = step, result
                if args.ray:  # actors of all strategies at once would be too many
                    seconds |= workshop_measure.fastest({name: steps.pop(name)}, state, batch, args.measure)
                    meshes.close()
                if name in FOLLOWED_BY:
                    name, follow = FOLLOWED_BY[name]
                    strategy = follow(result)
        seconds |= workshop_measure.fastest(steps, state, batch, args.measure)
    print_strategies(results)
    if args.measure:
        results = {
            name: dataclasses.replace(result, seconds=seconds[name]) for name, result in results.items()
        }
        workshop_measure.print_measured(results, args.batch_size * args.seq_len, seconds[ONE_DEVICE])
    workshop_claims.check_claims(results, args.noise)
    if "selected" in results:
        print(f"\nWhat was selected, and what else there is:\n\n{results['selected'].choice}")


def run(name: str, choice: mpmd.Choice, mesh, state, batch, expected, args: argparse.Namespace):
    """Runs the chosen step and compares it with plain JAX; returns it, and its ``Result``."""
    step = choice.jit(mesh).compile(state, *batch)
    new_state, loss = step(state, *batch)
    common.assert_close(f"{name}: loss", loss, expected[1], LIMIT)
    common.assert_close(f"{name}: parameters and moments", new_state, expected[0], LIMIT)
    if name == args.troubleshoot:
        workshop_troubleshooting.troubleshoot(choice, step, state, batch, args.output)
    return step, workshop_measure.profiled(choice, step, state, batch)


def planned_cluster(args: argparse.Namespace) -> mpmd.Cluster:
    """The devices that are planned for: those at hand if steps are measured, else ``CLUSTER``'s."""
    memory = {} if args.memory is None else {"memory": args.memory}
    if args.measure:
        return common.measured_cluster(args.ray, NUM_DEVICES, **memory)
    return dataclasses.replace(CLUSTER, **memory)


def train_step(state: dict, tokens: jax.Array, targets: jax.Array, config: gpt.GPTConfig, checkpoint=None):
    """One step of AdamW; the new state and the mean loss. On one device, the whole batch at once."""
    loss_fn = functools.partial(gpt.loss, config=config)
    if checkpoint is not None:
        loss_fn = checkpoint(loss_fn)
    loss, gradients = mpmd.value_and_grad(loss_fn)(state["params"], tokens, targets)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def choose(
    strategy: Strategy, config: gpt.GPTConfig, state, batch, cluster: mpmd.Cluster, args: argparse.Namespace
) -> mpmd.Choice:
    """Plans the step with what the strategy fixes."""
    step = functools.partial(train_step, config=config, checkpoint=strategy.checkpoint)
    cluster = dataclasses.replace(cluster, memory=strategy.memory or cluster.memory)
    return mpmd.plan(
        step, state, *batch, cluster=cluster, simulate=args.simulate, seconds=300, **strategy.fixed
    )


def print_strategies(results: Mapping[str, Result]) -> None:
    """Prints the predictions for each strategy, the fastest first."""
    print(f"\n{'strategy':23}      step  bubble reduce  peak memory  residuals  chosen")
    rows = {name: result.predicted for name, result in results.items()}
    for name, row in sorted(rows.items(), key=lambda item: item[1]["seconds"]):
        memory, all_reduce = row["memory"], row["communication"]
        print(
            f"{name:23} {row['seconds'] * 1e3:6.1f} ms {row['bubble']:7.1%}",
            f"{all_reduce:5.1%}{'!' if all_reduce > MOST_COMMUNICATION else ' '}",
            f"{memory['total'] / 2**20:8.2f} MiB {memory['residuals'] / 2**20:6.2f} MiB ",
            row["candidate"]["text"],
        )
    print(f"! all-reduces take more than {MOST_COMMUNICATION:.0%} of the step")


def init(config: gpt.GPTConfig) -> dict:
    """Parameters, and AdamW's moments of them."""
    params = gpt.init_params(jax.random.key(0), config)
    return {"params": params, "moments": OPTIMIZER.init(params)}


def make_batch(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and targets, each int32[batch_size, seq_len]."""
    shape = (2, args.batch_size, args.seq_len)
    tokens, targets = np.random.default_rng(0).integers(0, 256, shape, np.int32)
    return tokens, targets


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common.add_mesh_arguments(parser)
    add = parser.add_argument
    add(
        "--strategies",
        nargs="+",
        choices=STRATEGIES,
        default=list(STRATEGIES),
        help="those to run; by default all",
    )
    add("--layers", type=int, default=4)
    add("--d-model", type=int, default=32)
    add("--heads", type=int, default=8)
    add("--seq-len", type=int, default=128)
    add("--batch-size", type=int, default=16)
    add("--simulate", type=int, default=12, help="candidates of which the plans are simulated (default: 12)")
    add("--memory", type=float, help="bytes of a device, in place of the cluster's")
    add("--measure", type=int, nargs="?", const=5, default=0, help="time this many steps of each (5)")
    add("--noise", type=float, default=1.25, help="the factor that times may be off (default: %(default)g)")
    add("--troubleshoot", choices=STRATEGIES, default="pipeline, 1F1B", help="the strategy to look into")
    add("--output", type=pathlib.Path, help="a directory for the profile and the traces of its step")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
