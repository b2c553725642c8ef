"""Trains the GPT of ``gpt.py`` on long sequences, which are cut into slices.

    python examples/long_context_gpt.py              four groups of one process
    python examples/long_context_gpt.py --ray        on Ray actors
    python examples/long_context_gpt.py --seq-len 2048 --slices 8 --microbatches 2

One loss, a loop over slices, runs by two schedules. Under 1F1B, a task has all slices of a microbatch. Under
Seq1F1B, each slice has tasks of its own: groups wait less for one another, and keep less for their backwards.
Both have the losses and the parameters of plain ``jax.jit`` of the loss without slices.
"""

import argparse
import functools
import itertools
import time

import common
import gpt
import jax
import text_data

import mpmd
from mpmd.simulate import simulate

RELATIVE_LIMIT = 1e-4  # of each leaf's norm


def main(argv: list[str] | None = None) -> None:
    args, config, bounds = parse_arguments(argv)
    if not args.ray:
        common.fake_devices(args.stages)
    print(f"slices of {', '.join(str(b - a) for a, b in itertools.pairwise(bounds))} bytes")
    params = gpt.init_params(jax.random.key(0), config)
    text, _ = text_data.standard_library()
    shape = (args.microbatches, args.rows, args.seq_len)
    batches = [text_data.random_batch(text, shape, 0, step) for step in range(args.steps)]

    whole = functools.partial(gpt.loss, config=config)
    sliced = functools.partial(gpt.sliced_loss, config=config, bounds=bounds)
    expected, plain_losses = gpt.train(jax.jit(make_train_step(whole)), params, batches)
    schedules = (mpmd.Std1F1B(args.stages), mpmd.Seq1F1B(args.stages, args.slices))
    with common.open_mesh({"stage": args.stages}, args.ray, args.address, transport=args.transport) as mesh:
        for schedule in schedules:
            step = mpmd.jit(make_train_step(sliced, schedule), mesh, donate_argnums=0)
            began = time.perf_counter()
            step = step.compile(gpt.init_state(params), *batches[0])
            seconds = time.perf_counter() - began
            print(f"\n{schedule.name}: {len(step.plan.executables)} executables, compiled in {seconds:.1f} s")
            show(schedule, step, args.microbatches)
            state, losses = gpt.train(step, params, batches)
            print("losses in nats per byte: " + "  ".join(f"{loss:.6f}" for loss in losses))
            common.assert_close(f"{schedule.name}: losses", losses, plain_losses, RELATIVE_LIMIT)
            common.assert_close(
                f"{schedule.name}: parameters and moments", mpmd.to_host(state), expected, RELATIVE_LIMIT
            )


def attention_share(args: argparse.Namespace) -> float:
    """The share of attention in the work of a layer whose feed-forward part is four times as wide."""
    return args.seq_len / (args.seq_len + 12 * args.d_model)


def show(schedule: mpmd.Schedule, step, microbatches: int) -> None:
    """The bubble of the schedule where all tasks of a kind are equal, and the memory of each group."""
    simulation = simulate(schedule.tasks(microbatches), slices=schedule.slices)
    print(f"bubble {simulation.bubble:.1%} in the simulator")
    peaks = [group.memory.peak_bytes for group in step.report().groups]
    print("peak memory of the groups: " + ", ".join(f"{peak / 2**20:.1f} MiB" for peak in peaks))


def make_train_step(loss, schedule: mpmd.Schedule | None = None):
    """The step of tokens and targets, int32[num_microbatches, rows, seq_len] each."""

    def train_step(state, tokens, targets):

        def loss_and_gradients(microbatch):
            return jax.value_and_grad(loss)(state[0], *microbatch)

        mean, gradients = mpmd.treduce(
            loss_and_gradients, (tokens, targets), schedule=schedule, operation=mpmd.Mean
        )
        return gpt.updated(state, gradients), mean

    return train_step


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, gpt.GPTConfig, tuple[int, ...]]:
    """The arguments, the sizes of the model, and the bounds of slices of equal work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--stages", type=int, default=4, help="stages, each on a group of its own (default: 4)")
    add("--slices", type=int, default=4, help="slices of each sequence (default: 4)")
    add("--microbatches", type=int, default=4, help="microbatches per step (default: 4)")
    add("--rows", type=int, default=1, help="sequences of a microbatch (default: 1)")
    add("--seq-len", type=int, default=512, help="bytes per sequence (default: 512)")
    add("--layers", type=int, default=4)
    add("--d-model", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--steps", type=int, default=3)
    common.add_mesh_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("slices", "microbatches", "rows", "seq_len", "d_model", "heads", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.stages < 2:
        parser.error("--stages must be at least 2: slices wait for one another, so one group saves nothing")
    try:
        config = gpt.GPTConfig(args.layers, args.d_model, args.heads, args.seq_len, args.stages)
        return (
            args,
            config,
            mpmd.slice_bounds(args.seq_len, args.slices, attention_share=attention_share(args)),
        )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
