"""Trains a byte-level GPT on the source of Python's standard library, one group of stages per Ray actor.

    python examples/train_gpt.py                      four actors of a local Ray, less than two minutes
    python examples/train_gpt.py --steps 600          the longer training
    python examples/train_gpt.py --address auto       on the Ray cluster that is running
    python examples/train_gpt.py --in-process         without Ray, on four fake devices
    python examples/train_gpt.py --data 2 --model 2 --batch-size 16     groups of four devices

The first steps are also run by plain ``jax.jit`` on one device: the same numbers. A loss curve, a
timeline of one step and a page that explains where its time goes are written to ``--output``.
"""

import argparse
import functools
import math
import pathlib
import time
from typing import NamedTuple

import common
import gpt
import jax
import matplotlib.figure
import matplotlib.ticker
import numpy as np
import optax
import text_data
import tqdm
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd import render, simulate

REFERENCE_STEPS = 3
RELATIVE_LIMIT = 1e-4  # of each leaf's norm, after these steps
VALIDATIONS = 10
VALIDATION_BATCHES = 8
PROFILED_STEPS = 5
READ_TOGETHER, LEAVE_UNREAD = 10, 2


class TrainState(NamedTuple):
    params: dict
    opt_state: optax.OptState


def main(argv: list[str] | None = None) -> None:
    args, config, schedule = parse_arguments(argv)
    axes = common.mesh_axes(args, args.groups)
    if args.in_process:
        common.fake_devices(math.prod(axes.values()))
    with common.open_mesh(axes, not args.in_process, args.address, args.processes, args.transport) as mesh:
        run(args, config, schedule, mesh)


def run(args: argparse.Namespace, config: gpt.GPTConfig, schedule, mesh) -> None:
    batch, validation_batch = load_data(args)
    optimizer = make_optimizer(args.learning_rate, args.steps)
    train_step = make_train_step(config, optimizer, schedule)
    state = init_state(args.seed, config, optimizer)
    reference = plain_jax(train_step, state, batch, min(REFERENCE_STEPS, args.steps - 1))

    specs, batch_spec = state_specs(config, optimizer, state), P(None, "data")
    step = mpmd.jit(
        train_step, mpmd_mesh=mesh, in_shardings=(specs, batch_spec, batch_spec), donate_argnums=(0,)
    )
    step = step.compile(state, *batch(0))
    evaluate = mpmd.jit(
        make_evaluate(config, schedule), mpmd_mesh=mesh, in_shardings=(specs.params, batch_spec, batch_spec)
    )
    evaluate = evaluate.compile(state.params, *validation_batch)

    state, first_losses = first_steps(step, state, batch, *reference)
    steps = range(len(first_losses), args.steps)
    state, losses, validations = train(step, state, batch, steps, evaluate, validation_batch)
    print(f"validation loss: {validations[args.steps]:.3f} nats/byte")
    print_sample(state.params, config, args.seed)
    print(step.report())
    args.output.mkdir(parents=True, exist_ok=True)
    draw_losses([*first_losses, *losses], validations, args.output / "loss.png")
    draw_timeline(step, state, batch(args.steps), args)
    print(f"loss.png, timeline.png, timeline.json and profile.json are in {args.output}/")
    print(f"where the time of a step goes: {(args.output / 'profile.html').resolve().as_uri()}")


def load_data(args: argparse.Namespace):
    """A function from the step to its batch, and the batch to validate with.

    A batch is tokens and targets, each int32[num_microbatches, microbatch_size, seq_len].
    """
    train_text, validation_text = text_data.standard_library()
    print(f"text: {len(train_text):,} bytes to train on, {len(validation_text):,} to validate with")
    size = args.batch_size // args.microbatches
    shape = (args.microbatches, size, args.seq_len)
    validation_shape = (args.microbatches, VALIDATION_BATCHES * size, args.seq_len)
    batch = functools.partial(text_data.random_batch, train_text, shape, args.seed)
    return batch, text_data.evenly_spaced(validation_text, validation_shape)


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with clipping, a linear warm-up and a cosine decay to a tenth."""
    warmup_steps = max(1, min(50, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / warmup_steps, learning_rate, warmup_steps, max(steps, 2), learning_rate / 10
    )
    adamw = optax.adamw(schedule, b2=0.95, eps=1e-6, weight_decay=0.1)  # rounding is below this epsilon
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_train_step(config: gpt.GPTConfig, optimizer: optax.GradientTransformation, schedule):
    """The train step, as one would write it for one device.

    Its ``tokens`` and ``targets`` are int32[num_microbatches, microbatch_size, seq_len].
    """

    def train_step(state: TrainState, tokens, targets):
        def loss_and_gradients(microbatch):
            return jax.value_and_grad(gpt.loss)(state.params, *microbatch, config)

        loss, gradients = mpmd.treduce(
            loss_and_gradients, (tokens, targets), schedule=schedule, operation=mpmd.Mean
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    return train_step


def make_evaluate(config: gpt.GPTConfig, schedule):
    """The mean loss of a batch shaped as in ``make_train_step``: only forwards, in the same pipeline."""

    def evaluate(params: dict, tokens, targets):
        def loss(microbatch):
            return gpt.loss(params, *microbatch, config)

        return mpmd.treduce(loss, (tokens, targets), schedule=schedule, operation=mpmd.Mean)

    return evaluate


def init_state(seed: int, config: gpt.GPTConfig, optimizer: optax.GradientTransformation) -> TrainState:
    params = gpt.init_params(jax.random.key(seed), config)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"model: {num_params:,} parameters in {config.num_layers} layers and {config.num_stages} stages")
    return TrainState(params, optimizer.init(params))


def state_specs(
    config: gpt.GPTConfig, optimizer: optax.GradientTransformation, state: TrainState
) -> TrainState:
    """The sharding of each leaf within its group: the moments of a parameter are split as it is."""
    params = gpt.param_specs(config)
    of_optimizer = optax.tree.map_params(
        optimizer, lambda _, spec: spec, state.opt_state, params, transform_non_params=lambda _: P()
    )
    return TrainState(params, of_optimizer)


def plain_jax(train_step, state: TrainState, batch, steps: int) -> tuple[TrainState, list[float]]:
    """The first steps on one device: the state and the losses. ``treduce`` is then a scan."""
    step = jax.jit(train_step)
    losses = []
    for index in range(steps):
        state, loss = step(state, *batch(index))
        losses.append(float(loss))
    return state, losses


def first_steps(
    step, state: TrainState, batch, expected_state: TrainState, expected_losses: list[float]
) -> tuple[TrainState, list[float]]:
    """The first steps in the pipeline, which are compared with those of plain ``jax.jit``."""
    losses = []
    print("the first losses, in nats per byte:\nstep  plain jax.jit   pipeline  difference")
    for index, expected in enumerate(expected_losses):
        state, loss = step(state, *batch(index))
        losses.append(float(loss))
        print(f"{index + 1:4}  {expected:13.6f}  {losses[-1]:9.6f}  {losses[-1] - expected:10.1e}")
    common.assert_close("losses", np.array(losses), np.array(expected_losses), RELATIVE_LIMIT)
    common.assert_close("parameters and moments", mpmd.to_host(state), expected_state, RELATIVE_LIMIT)
    return state, losses


def train(step, state: TrainState, batch, steps: range, evaluate, validation_batch):
    """Trains for ``steps``; returns the state, the losses, and {step: validation loss}.

    Calls return at once, with arrays that stay on the actors until they are read. Reading only losses
    that are a few steps old leaves the actors with the next steps at hand.
    """
    losses, unread, validations = [], [], {}
    validate_at = {steps.stop * part // VALIDATIONS for part in range(1, VALIDATIONS + 1)}
    tokens_per_step = batch(0)[0].size
    began = time.perf_counter()
    with tqdm.tqdm(unit="step", initial=steps.start, total=steps.stop) as progress:

        def read(count: int) -> None:
            losses.extend(map(float, unread[:count]))
            del unread[:count]
            speed = len(losses) * tokens_per_step / (time.perf_counter() - began)
            progress.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
            progress.update(count)

        for index in steps:
            state, loss = step(state, *batch(index))
            unread.append(loss)
            if index + 1 in validate_at:
                validations[index + 1] = evaluate(state.params, *validation_batch)
            if len(unread) == READ_TOGETHER + LEAVE_UNREAD:
                read(READ_TOGETHER)
        read(len(unread))
    seconds = time.perf_counter() - began
    print(f"trained for {seconds:.0f} s at {len(losses) * tokens_per_step / seconds:,.0f} tokens/s")
    return state, losses, {index: float(loss) for index, loss in validations.items()}


def print_sample(params: dict, config: gpt.GPTConfig, seed: int) -> None:
    """Has the model write 400 bytes, in this process."""
    params = mpmd.to_host(params)  # from the actors that hold them
    sample = gpt.generate(params, b"def ", 400, config, seed)
    print(f"sample:\n{sample.decode(errors='replace')}\n")


def draw_losses(losses: list[float], validations: dict[int, float], path: pathlib.Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, alpha=0.6, label="training")
    axes.plot(validations.keys(), validations.values(), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="GPT on Python's standard library")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(path, dpi=150)


def draw_timeline(step, state: TrainState, batch, args: argparse.Namespace) -> None:
    """Profiles steps, draws the last one beside the ideal, and writes a page of them; uses up ``state``."""
    profile = step.profile(state, *batch, steps=PROFILED_STEPS)
    print(f"{profile}\n")
    profile.save(args.output / "profile.json")
    profile.write_html(args.output / "profile.html")
    _, events = profile
    ideal = simulate.simulate(step.plan, simulate.Costs.measured(events))
    title = f"{args.schedule}: one training step on {'one process' if args.in_process else 'Ray'}"
    render.draw_timeline(events, args.output / "timeline.png", title, ideal=ideal)
    render.chrome_trace(events, args.output / "timeline.json")


def parse_arguments(argv: list[str] | None):
    """The arguments, the model's configuration and the schedule; exits with one line if they disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--stages", type=int, default=4, help="pipeline stages; layers are spread evenly (default: 4)")
    add("--groups", type=int, help="MPMD groups, that is actors (default: one per stage)")
    add("--schedule", choices=("GPipe", "Std1F1B", "Eager1F1B", "Interleaved1F1B"), default="Std1F1B")
    add("--microbatches", type=int, default=8, help="microbatches per step (default: 8)")
    add("--layers", type=int, default=8)
    add("--d-model", type=int, default=112)
    add("--heads", type=int, default=4)
    add("--seq-len", type=int, default=128, help="bytes per sequence (default: 128)")
    add("--batch-size", type=int, default=8, help="sequences per step (default: 8)")
    add("--steps", type=int, default=300)
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    common.add_group_arguments(parser)
    common.add_ray_arguments(parser)
    add("--in-process", action="store_true", help="no Ray: one thread per group, on fake devices")
    add("--output", type=pathlib.Path, default=pathlib.Path("demo_output"))
    args = parser.parse_args(argv)
    args.groups = args.groups or args.stages
    common.check_group_arguments(parser, args, not args.in_process)
    try:
        return args, *make_config_and_schedule(args)
    except ValueError as error:
        parser.error(str(error))


def make_config_and_schedule(args: argparse.Namespace):
    """Raises ``ValueError`` if the arguments do not fit together."""
    for name in ("stages", "groups", "microbatches", "layers", "heads", "seq_len", "batch_size", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if args.batch_size % args.microbatches:
        raise ValueError(f"{args.batch_size} sequences do not divide into {args.microbatches} microbatches")
    if (size := args.batch_size // args.microbatches) % args.data:
        raise ValueError(f"microbatches of {size} sequences do not divide over --data {args.data}")
    if args.heads % args.model:
        raise ValueError(f"{args.heads} heads do not divide over --model {args.model}")
    config = gpt.GPTConfig(args.layers, args.d_model, args.heads, args.seq_len, args.stages)
    if args.schedule == "Interleaved1F1B":
        return config, mpmd.Interleaved1F1B(num_stages=args.stages, mpmd_dim=args.groups)
    if args.groups != args.stages:
        raise ValueError(f"{args.schedule} puts one stage on a group: --groups must be {args.stages}")
    return config, getattr(mpmd, args.schedule)(num_stages=args.stages)


if __name__ == "__main__":
    main()
