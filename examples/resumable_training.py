"""Training that survives the death of its driver: run it again, and it goes on from its last checkpoint.

    python examples/resumable_training.py --kill-at 5       ends by SIGKILL after step 5
    python examples/resumable_training.py                   goes on, and prints the losses it would have had
    python examples/resumable_training.py --ray             the same on two Ray actors

    python examples/resumable_training.py --ray --kill-groups-at 5      both actors die, this process goes on

A checkpoint has all that the next step depends on: the state of the model and of the optimizer, written by
the groups themselves, and the state of the iterator over the data, written by this process. See "When the
driver dies" in docs/checkpoints.md. When groups die, ``--ray`` repairs them; where no copy of their values is
left, the same checkpoint helps, and the groups that were repaired go on.
"""

import argparse
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import text_data

import mpmd

NUM_STAGES = 2
BATCH_SHAPE = (4, 2, 16)  # microbatches, sequences of one, bytes of a sequence
WIDTH = 32
OPTIMIZER = optax.adam(1e-2)


class TrainState(NamedTuple):
    params: dict
    opt_state: optax.OptState


class Batches:
    """An endless iterator over random windows of a text, whose ``state`` can be saved as JSON and set again.

    Each item is tokens and targets, int32[*BATCH_SHAPE] each.
    """

    def __init__(self, text: np.ndarray, seed: int):
        self._text = text
        self._rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        return text_data.windows_at_random(self._text, BATCH_SHAPE, self._rng)

    @property
    def state(self) -> dict:
        return self._rng.bit_generator.state

    @state.setter
    def state(self, state: dict) -> None:
        self._rng.bit_generator.state = state


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not args.ray:
        common.fake_devices(NUM_STAGES)
    train_text, _ = text_data.standard_library()
    with common.open_mesh(
        {"stage": NUM_STAGES}, args.ray, args.address, transport=args.transport, recover=True
    ) as mesh:
        train(args, mesh, Batches(train_text, seed=0))


def train(args: argparse.Namespace, mesh, batches: Batches) -> None:
    """Trains from the latest checkpoint, or from the start, and prints the loss of each step."""
    key = jax.random.key(0)
    tokens = jax.ShapeDtypeStruct(BATCH_SHAPE, np.int32)
    step = mpmd.jit(train_step, mesh, donate_argnums=0)
    step = step.compile(jax.eval_shape(init_state, key), tokens, tokens)
    beginning = batches.state
    check_step(step, key, next(batches))
    while True:
        try:
            with open_checkpoints(args.directory) as manager:  # a new one forgets the save that was lost
                resumed_at = manager.latest_step()
                if resumed_at is None:
                    state, batches.state = step.init(init_state, key), beginning
                else:
                    state, batches.state = restore(manager, resumed_at, step, mesh)
                    print(f"resumed after step {resumed_at}", flush=True)
                run_steps(args, mesh, step, state, batches, manager, resumed_at)
            break
        except mpmd.StateLostError as lost:  # new processes and the step are there, but no values
            print(f"the state is lost: {lost}", flush=True)
    print(f"step {args.steps} of {args.steps} is done; {args.directory} has its checkpoint")


def check_step(step, key: jax.Array, batch) -> None:
    """Compares the step with plain JAX, from a new state; raises ``AssertionError`` where they differ."""
    check = mpmd.check(step, train_step, init_state(key), *batch)
    if not check.ok:
        raise AssertionError(f"the pipeline does not compute what plain JAX does:\n{check}")


def run_steps(args, mesh, step, state: TrainState, batches: Batches, manager, resumed_at: int | None) -> None:
    """The steps after ``resumed_at``, or all. Prints the loss of each."""
    for number in range((resumed_at or 0) + 1, args.steps + 1):
        state, loss = step(state, *next(batches))
        if number % args.every == 0 or number == args.steps:
            save(manager, number, state, batches.state)
        print(f"step {number}: loss {float(loss)!r}", flush=True)
        if resumed_at is None and number == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if resumed_at is None and number == args.kill_groups_at:
            for group in mesh.groups:
                os.kill(group.pid, signal.SIGKILL)


def open_checkpoints(directory: pathlib.Path) -> ocp.CheckpointManager:
    """The manager of the run's checkpoints. Left as a context, it waits until all are complete."""
    return ocp.CheckpointManager(
        directory.absolute(),
        item_handlers={"state": mpmd.checkpoint.handler(), "data": ocp.JsonCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True),
    )


def save(manager: ocp.CheckpointManager, number: int, state: TrainState, data: dict) -> None:
    """Begins a checkpoint, and waits for the one before if that is still being written."""
    items = {"state": ocp.args.PyTreeSave(state), "data": ocp.args.JsonSave(data)}
    manager.save(number, args=ocp.args.Composite(**items))


def restore(manager: ocp.CheckpointManager, number: int, step, mesh) -> tuple[TrainState, dict]:
    """The state, on the groups that read it, and the state of the iterator over the data."""
    state = mpmd.checkpoint.restore_args(step.argument_leaves(), mesh)
    restored = manager.restore(number, args=ocp.args.Composite(state=state, data=ocp.args.JsonRestore()))
    return restored["state"], restored["data"]


def loss_of_microbatch(params: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte, predicted from one byte alone, in two stages."""
    hidden = mpmd.mark_stage_end(jnp.tanh(params["embedding"][tokens]))
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], targets).mean()


def train_step(state: TrainState, tokens: jax.Array, targets: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_and_gradients(microbatch):
        return jax.value_and_grad(loss_of_microbatch)(state.params, *microbatch)

    schedule = mpmd.Std1F1B(num_stages=NUM_STAGES)
    loss, gradients = mpmd.treduce(
        loss_and_gradients, (tokens, targets), schedule=schedule, operation=mpmd.Mean
    )
    updates, opt_state = OPTIMIZER.update(gradients, state.opt_state)
    return TrainState(optax.apply_updates(state.params, updates), opt_state), loss


def init_state(key: jax.Array) -> TrainState:
    shapes = {"embedding": (256, WIDTH), "head": (WIDTH, 256)}
    keys = jax.random.split(key, len(shapes))
    params = {name: jax.random.normal(k, shapes[name]) / 4 for name, k in zip(shapes, keys, strict=True)}
    return TrainState(params, OPTIMIZER.init(params))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common.add_mesh_arguments(parser)
    add = parser.add_argument
    add("--directory", type=pathlib.Path, default=pathlib.Path("demo_output/resumable"))
    add("--steps", type=int, default=20, help="the steps of the whole run (default: 20)")
    add("--every", type=int, default=2, help="steps from one checkpoint to the next (default: 2)")
    add("--kill-at", type=int, help="SIGKILL this process after that step, unless the run was resumed")
    add("--kill-groups-at", type=int, help="SIGKILL the groups on Ray after that step, unless as above")
    args = parser.parse_args(argv)
    if args.kill_groups_at is not None and not args.ray:
        parser.error("--kill-groups-at is for groups on Ray")
    for name in ("steps", "every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


if __name__ == "__main__":
    main()
