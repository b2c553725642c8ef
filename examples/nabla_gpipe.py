"""Gradient parity of a GPipe pipeline, after Nabla's GPipe example: x, w and b within 5e-4 of JAX.

    python examples/nabla_gpipe.py              in one process, on four fake devices
    python examples/nabla_gpipe.py --ray        on four Ray actors

Four stages of a linear layer and a ReLU, eight microbatches. The gradients of the parameters are summed
over the microbatches; those of the input, one for each microbatch, are collected by ``Concat``.

With ``--data`` the devices of a group split every microbatch, and with ``--model`` the weights: the stages
are pairs of a matrix that is split by columns and one that is split by rows.
"""

import argparse
import math

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd

NUM_STAGES = 4
NUM_MICROBATCHES = 8
MICROBATCH_SIZE = 4
DIM = 16
LIMIT = 5e-4


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, argv)
    run(args, NUM_MICROBATCHES)
    print("the gradients of the pipeline are those of JAX")


def parse_arguments(description: str, argv: list[str] | None, data: int = 1) -> argparse.Namespace:
    """The arguments of both of Nabla's examples, of which one has groups of one device by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    common.add_mesh_arguments(parser)
    common.add_group_arguments(parser, data=data)
    args = parser.parse_args(argv)
    common.check_group_arguments(parser, args, args.ray)
    if MICROBATCH_SIZE % args.data or DIM % args.model:
        parser.error(f"--data must divide {MICROBATCH_SIZE} rows, and --model {DIM} features")
    return args


def run(args: argparse.Namespace, num_microbatches: int) -> None:
    """Compares the pipeline's gradients with those of JAX."""
    axes = common.mesh_axes(args, NUM_STAGES)
    if not args.ray:
        common.fake_devices(math.prod(axes.values()))
    params, xs, ys = make_data(num_microbatches)
    batch_spec = P(None, "data")  # of [microbatches, microbatch_size, dim]
    with common.open_mesh(axes, args.ray, args.address, args.processes) as mesh:
        step = mpmd.mpmd_jit_with_loop(
            loss_and_gradients, mpmd_mesh=mesh, in_specs=(param_specs(), batch_spec, batch_spec)
        )
        assert_parity(step(params, xs, ys), params, xs, ys)


def make_data(num_microbatches: int):
    """Per-stage parameters ``{"w": f32[DIM, DIM], "b": f32[DIM]}``, inputs and targets.

    The inputs and the targets are float32[num_microbatches, MICROBATCH_SIZE, DIM]. The draws are those of
    Nabla's examples, so the losses are the ones they print.
    """
    rng = np.random.RandomState(42)

    def normal(*shape):
        return rng.randn(*shape).astype(np.float32)

    ws, bs = normal(NUM_STAGES, DIM, DIM), normal(NUM_STAGES, DIM)
    params = [{"w": w, "b": b} for w, b in zip(ws, bs, strict=True)]
    shape = (num_microbatches, MICROBATCH_SIZE, DIM)
    return params, normal(*shape), normal(*shape)


def param_specs() -> list[dict]:
    """Megatron's pairs: the columns that a stage makes on a device are the rows that the next one reads."""
    columns = {"w": P(None, "model"), "b": P("model")}
    rows = {"w": P("model", None), "b": P()}
    return [columns if index % 2 == 0 else rows for index in range(NUM_STAGES)]


def stage(params: dict, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["w"] + params["b"])


def pipeline_loss(params: list[dict], x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error of one microbatch."""
    for stage_params in params:
        x = mpmd.mark_stage_end(stage(stage_params, x))
    return jnp.mean((x - y) ** 2)


def loss_and_gradients(params: list[dict], xs: jax.Array, ys: jax.Array):
    """The loss of the whole batch, and its gradients with respect to ``params`` and ``xs``."""
    num_microbatches = len(xs)

    def share_of_loss(params, x, y):
        return pipeline_loss(params, x, y) / num_microbatches

    def one_microbatch(microbatch):
        return jax.value_and_grad(share_of_loss, argnums=(0, 1))(params, *microbatch)

    return mpmd.treduce(
        one_microbatch,
        (xs, ys),
        schedule=mpmd.GPipe(num_stages=NUM_STAGES),
        operation=(mpmd.Add, (mpmd.Add, mpmd.Concat())),
    )


@jax.jit
def reference(params: list[dict], xs: jax.Array, ys: jax.Array):
    """The same without microbatches, marks or ``treduce``: the whole batch at once, on one device."""

    def loss(params, xs):
        for stage_params in params:
            xs = stage(stage_params, xs)
        return jnp.mean((xs - ys) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(params, xs)


def assert_parity(pipelined, params: list[dict], xs: np.ndarray, ys: np.ndarray) -> None:
    """Compares what ``loss_and_gradients`` returned in a pipeline with the reference."""
    loss, (param_gradients, x_gradients) = pipelined
    expected_loss, (expected_params, expected_xs) = reference(params, xs, ys)
    print(f"loss: {float(loss):.6f} in the pipeline, {float(expected_loss):.6f} in JAX")
    for name in ("w", "b"):
        actual = [gradients[name] for gradients in param_gradients]
        expected = [gradients[name] for gradients in expected_params]
        common.assert_close(f"gradients of {name}", actual, expected, LIMIT)
    common.assert_close("gradients of x", x_gradients, expected_xs, LIMIT)


if __name__ == "__main__":
    main()
