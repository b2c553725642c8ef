"""Steps with one planted fault each, and the profile that names it.

    python examples/read_a_profile.py                     # the faults of one process
    python examples/read_a_profile.py --ray               # all three, on Ray actors
    python examples/read_a_profile.py straggler --ray

A small model of four stages has one of these faults:

    straggler        one microbatch takes many times as long on group 2
    unequal_stages   stage 1 has 1,000 times the layers of the others
    late_driver      the driver sends a large batch, for which a group waits before it can begin

For each the program prints the profile, whose first finding is the fault, and writes a page to ``--output``.
In one process the driver hands the batch over without a copy: the last fault needs Ray.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np

import mpmd

STAGES, MICROBATCHES, ROWS, WIDTH = 4, 12, 16, 128
PROFILED_STEPS = 5


class Fault(NamedTuple):
    """A planted fault.

    Attributes:
      causes: of its finding in ``profile.findings``, one of them.
      layers: the number of layers of each stage, which all have the same weights.
      rounds: the passes that stage 2 adds for microbatch 4.
      unused: the numbers of each microbatch that the driver sends and of which only one is read.
    """

    causes: tuple[str, ...]
    layers: tuple[int, ...] = (1, 1, 1, 1)
    rounds: int = 0
    unused: int = 1


FAULTS = {
    "straggler": Fault(("jitter",), rounds=40_000),
    "unequal_stages": Fault(("imbalance",), layers=(1, 1000, 1, 1)),
    # Until a group has the batch, it is the driver; from then until it is on the devices, the late begin.
    "late_driver": Fault(("driver", "late_begin"), unused=4_000_000),
}
IN_PROCESS = ("straggler", "unequal_stages")


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    common.fake_devices(1 if args.ray else STAGES)
    args.output.mkdir(parents=True, exist_ok=True)
    missed = []
    with common.open_mesh({"stage": STAGES}, args.ray, args.address, transport=args.transport) as mesh:
        for name in args.faults:
            profile = profile_of(FAULTS[name], mesh)
            print(f"{name}:\n{profile}\n")
            profile.save(args.output / f"{name}.json")
            profile.write_html(args.output / f"{name}.html")
            if not profile.findings or profile.findings[0].cause not in FAULTS[name].causes:
                missed.append(name)
    print(f"pages and profiles are in {args.output}/")
    if missed:
        sys.exit(f"the first finding is another than the planted fault: {', '.join(missed)}")


def profile_of(fault: Fault, mesh) -> mpmd.Profile:
    """The profile of some steps with a fault."""
    rng = np.random.default_rng(0)
    params = [rng.standard_normal((WIDTH, WIDTH), "float32") / 16 for _ in range(STAGES)]
    batch = {
        "x": rng.standard_normal((MICROBATCHES, ROWS, WIDTH), "float32"),
        "rounds": np.where(np.arange(MICROBATCHES) == 4, fault.rounds, 0).astype("int32"),
        "unused": np.zeros((MICROBATCHES, fault.unused), "float32"),
    }
    step = mpmd.jit(make_train_step(fault), mesh, donate_argnums=0).compile(params, batch)
    for _ in range(2):  # the first steps are slower
        params, loss = step(params, batch)
    jax.block_until_ready(loss)
    return step.profile(params, batch, steps=PROFILED_STEPS)


def make_train_step(fault: Fault) -> Callable:
    """A step of gradient descent on four stages with the fault."""

    def stage(number, weight, x, batch):
        def layer(_, x):
            return jnp.tanh(x @ weight)

        if number == 2:
            more = jax.lax.fori_loop(0, batch["rounds"], layer, x)
            x = x + 1e-3 * jax.lax.stop_gradient(more)
        return jax.lax.fori_loop(0, fault.layers[number], layer, x)

    def loss_fn(params, batch):
        x = batch["x"] + batch["unused"][0]
        for number, weight in enumerate(params):
            x = stage(number, weight, x, batch)
            if number < STAGES - 1:
                x = mpmd.mark_stage_end(x)
        return jnp.mean(x**2)

    def train_step(params, batch):
        loss, gradients = mpmd.treduce(
            lambda microbatch: jax.value_and_grad(loss_fn)(params, microbatch),
            batch,
            schedule=mpmd.Std1F1B(STAGES),
            operation=mpmd.Mean,
        )
        return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), loss

    return train_step


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("faults", nargs="*", help="by default all that can be seen there")
    common.add_mesh_arguments(parser)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("profiles"), help="a directory")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.faults if name not in FAULTS]:
        parser.error(f"{', '.join(unknown)}: no such fault; they are {', '.join(FAULTS)}")
    if not args.ray and (remote := [name for name in args.faults if name not in IN_PROCESS]):
        parser.error(f"{', '.join(remote)}: can be seen with --ray only")
    args.faults = args.faults or list(FAULTS if args.ray else IN_PROCESS)
    return args


if __name__ == "__main__":
    main()
