"""The Workshop guide's strategies, planned and run for one transformer, and its troubleshooting.

    python examples/workshop_strategies.py              in one process, on eight fake devices
    python examples/workshop_strategies.py --ray        on Ray actors

    python examples/workshop_strategies.py --strategies selected --memory 1.8e6    devices with less memory

A strategy is what ``mpmd.plan`` is told to keep to: the number of groups, the devices of a group along each
axis, or checkpointing; nothing, in the end, and then it selects one itself. The model does not know which.
Each step is compared with plain ``jax.jit`` on one device, and a table compares what is predicted of them.

The predictions are for two nodes of four devices as fast as ``CLUSTER`` says, where the sizes of ``--help``
take milliseconds. What runs are the same groups, on the devices that are here. A device has far more memory
than these sizes need; where it has less, another strategy is selected.
"""

import argparse
import collections
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import common
import gpt
import jax
import numpy as np
import optax

import mpmd
from mpmd.events import Event, Wait
from mpmd.simulate import Link

NUM_DEVICES = 8
LIMIT = 1e-5
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
    """What is fixed for ``mpmd.plan``.

    Attributes:
      fixed: its keyword arguments.
      checkpoint: what rematerializes parts of the loss; ``None`` leaves that to the plan.
    """

    fixed: Mapping
    checkpoint: Callable | None = None


# Keeps what products with weights make, and computes attention's scores and weights again.
checkpoint_attention = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)
ONE_GROUP = {"groups": 1, "num_stages": 1, "remat": False, "fsdp": False}
PIPELINE = {**ONE_GROUP, "groups": 4, "num_stages": 4, "num_microbatches": 8}
STAGES_1F1B = {**PIPELINE, "submesh": {}, "schedule": mpmd.Std1F1B}
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
    "selected": Strategy({}),
}


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not args.ray:
        common.fake_devices(NUM_DEVICES)
    config = gpt.GPTConfig(args.layers, args.d_model, args.heads, args.seq_len)
    state, batch = init(config), make_batch(args)
    expected = jax.jit(functools.partial(train_step, config=config))(state, *batch)
    choices = {}
    with common.ray_connection(args.ray, args.address):
        for name in args.strategies:
            choice = choices[name] = choose(STRATEGIES[name], config, state, batch, args)
            with common.open_groups(choice.launch["groups"], args.ray, args.transport) as mesh:
                step = choice.jit(mesh, donate_argnums=()).compile(state, *batch)
                new_state, loss = step(state, *batch)
                common.assert_close(f"{name}: loss", loss, expected[1], LIMIT)
                common.assert_close(f"{name}: parameters and moments", new_state, expected[0], LIMIT)
                if name == args.troubleshoot:
                    troubleshoot(choice, step, step.profile(state, *batch)[1], args.output)
    print_strategies(choices)
    if "selected" in choices:
        print(f"\nWhat was selected, and what else there is:\n\n{choices['selected']}")


def train_step(state: dict, tokens: jax.Array, targets: jax.Array, config: gpt.GPTConfig, checkpoint=None):
    """One step of AdamW; the new state and the mean loss. On one device, the whole batch at once."""
    loss_fn = functools.partial(gpt.loss, config=config)
    if checkpoint is not None:
        loss_fn = checkpoint(loss_fn)
    loss, gradients = mpmd.value_and_grad(loss_fn)(state["params"], tokens, targets)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def choose(strategy: Strategy, config: gpt.GPTConfig, state, batch, args: argparse.Namespace) -> mpmd.Choice:
    """Plans the step with what the strategy fixes."""
    step = functools.partial(train_step, config=config, checkpoint=strategy.checkpoint)
    cluster = dataclasses.replace(CLUSTER, memory=args.memory)
    return mpmd.plan(
        step, state, *batch, cluster=cluster, simulate=args.simulate, seconds=300, **strategy.fixed
    )


def print_strategies(choices: Mapping[str, mpmd.Choice]) -> None:
    """What is predicted of each strategy, the fastest first."""
    print(f"\n{'strategy':23}      step  bubble   sums  peak memory  residuals  chosen")
    rows = {name: json.loads(choice.to_json())["rows"][0] for name, choice in choices.items()}
    for name, row in sorted(rows.items(), key=lambda item: item[1]["seconds"]):
        memory, sums = row["memory"], row["communication"]
        print(
            f"{name:23} {row['seconds'] * 1e3:6.1f} ms {row['bubble']:7.1%}",
            f"{sums:5.1%}{'!' if sums > MOST_COMMUNICATION else ' '}",
            f"{memory['total'] / 2**20:8.2f} MiB {memory['residuals'] / 2**20:6.2f} MiB ",
            row["candidate"]["text"],
        )
    print(f"! sums over devices take more than {MOST_COMMUNICATION:.0%} of the step")


def troubleshoot(choice: mpmd.Choice, step, events: Sequence[Event], output: pathlib.Path | None) -> None:
    """What answers the guide's questions of a slow step that runs out of memory.

    Args:
      events: of one step: when each group did what.
      output: where the profile is drawn, if anywhere.
    """
    prediction = choice.best.prediction
    print("\nIs it communication? Between devices of a group, predicted:", end=" ")
    print(f"{prediction.communication:.1%} of the step. Between groups, in a step:")
    for edge in mpmd.explain(step).edges:
        print(f"group {edge.src} sends group {edge.dst} {edge.nbytes / 2**20:.3f} MiB")
    print("\nIs the load balanced? Predicted for a microbatch:", end=" ")
    print(", ".join(f"stage {i} {s * 1e3:.2f} ms" for i, s in enumerate(prediction.stage_seconds)))
    print_busy_groups(events)
    print(f"\nWhat takes memory, and what else is conspicuous?\n{step.report()}\n")
    if output:
        output.mkdir(parents=True, exist_ok=True)
        mpmd.render.draw_timeline(events, output / "step.svg", "one step", ideal=choice.simulation)
        (output / "step.json").write_text(json.dumps(mpmd.render.chrome_trace(events)))
        print(f"the profile beside the prediction: {output}/step.svg; for Perfetto: {output}/step.json\n")


def print_busy_groups(events: Sequence[Event]) -> None:
    """The share of a step in which each group computes."""
    span = max(event.end for event in events) - min(event.start for event in events)
    busy = collections.Counter()
    for event in events:
        busy[event.mpmd_idx] += 0.0 if isinstance(event.activity, Wait) else event.duration
    shares = ", ".join(f"group {group} {busy[group] / span:.0%}" for group in sorted(busy))
    print(f"Measured here, share of {span * 1e3:.1f} ms in which a group computes: {shares}")


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
    add("--d-model", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--seq-len", type=int, default=64)
    add("--batch-size", type=int, default=16)
    add("--simulate", type=int, default=12, help="candidates of which the plans are simulated (default: 12)")
    add("--memory", type=float, default=CLUSTER.memory, help="bytes of a device (default: %(default)g)")
    add("--troubleshoot", choices=STRATEGIES, default="pipeline, 1F1B", help="the strategy to look into")
    add("--output", type=pathlib.Path, help="a directory for the profile of its step")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
