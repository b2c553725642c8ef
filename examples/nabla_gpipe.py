"""Gradient parity of a GPipe pipeline, after Nabla's GPipe example: x, w and b within 5e-4 of JAX.

    python examples/nabla_gpipe.py              in one process, on four fake devices
    python examples/nabla_gpipe.py --ray        on four Ray actors

Four stages of a linear layer and a ReLU, eight microbatches. The gradients of the parameters are summed
over the microbatches; those of the input, one for each microbatch, are collected by ``Concat``.

With ``--data`` the devices of a group split every microbatch, and with ``--model`` the weights: the stages
are pairs of a matrix that is split by columns and one that is split by rows.
"""

import argparse

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.ir.plan import Send

NUM_STAGES = 4
NUM_MICROBATCHES = 8
MICROBATCH_SIZE = 4
DIM = 16
LIMIT = 5e-4  # Nabla's own
RELATIVE_LIMIT = 1e-5  # of each gradient's norm

BATCH_SPEC = P(None, "data")  # of [microbatches, microbatch_size, dim]


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
    """Compares the pipeline's gradients with those of JAX, and checks where everything is."""
    axes = common.mesh_axes(args, NUM_STAGES)
    common.fake_devices(args.data * args.model * (1 if args.ray else NUM_STAGES))
    params, xs, ys = make_data(num_microbatches)
    with common.open_mesh(axes, args.ray, args.address, args.processes, args.transport) as mesh:
        print(mesh)
        step = mpmd.jit(
            loss_and_gradients, mpmd_mesh=mesh, in_shardings=(param_specs(), BATCH_SPEC, BATCH_SPEC)
        ).compile(params, xs, ys)
        check_inputs(step, mesh, args)
        check_edges(step, args)
        check_collectives(step, mesh, args)
        assert_parity(step(params, xs, ys), params, xs, ys)


def check_inputs(step, mesh, args: argparse.Namespace) -> None:
    """Each stage's weights are on its group alone, the inputs on the first one, the targets on the last."""
    params, xs, ys = map(step.argument_leaves, range(3))
    leaves = [params[stage][name] for stage in range(NUM_STAGES) for name in ("w", "b")]
    for leaf in [*leaves, xs, ys]:
        print(
            f"{leaf.path}: {leaf.aval.dtype}{leaf.aval.shape} on groups {leaf.mpmd_idxs}, "
            f"sharded {leaf.spec}: {shard_shape(leaf, mesh)} on each device"
        )
    on_groups = [leaf.mpmd_idxs for leaf in [*leaves, xs, ys]]
    expected = [(stage,) for stage in range(NUM_STAGES) for _ in ("w", "b")]
    assert on_groups == [*expected, (0,), (NUM_STAGES - 1,)], on_groups
    for leaf in (xs, ys):
        num_microbatches, rows, dim = leaf.aval.shape
        here = shard_shape(leaf, mesh)
        assert here == (num_microbatches, rows // args.data, dim), f"{leaf.path} is {here} on each device"


def shard_shape(leaf, mesh) -> tuple[int, ...]:
    """The shape of what each device of a group has of an argument's leaf."""
    submesh = mesh.abstract_submeshes[leaf.mpmd_idxs[0]]
    return jax.sharding.NamedSharding(submesh, P(*leaf.spec)).shard_shape(leaf.aval.shape)


def check_edges(step, args: argparse.Namespace) -> None:
    """Neighbours send activations forward and gradients back, of which a device gets its part of the rows."""
    specs = specs_of_values(step.plan)
    sent: dict[tuple[int, int], set] = {}
    for program in step.plan.programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                edge = program.mpmd_idx, instruction.dst
                sent.setdefault(edge, set()).update(specs[value] for value in instruction.values)
    for (source, target), found in sorted(sent.items()):
        replicas = [((source, replica), (target, replica)) for replica in range(args.data)]
        print(f"group {source} sends group {target} values sharded {found}; (group, replica): {replicas}")
    neighbours = {(stage, stage + 1) for stage in range(NUM_STAGES - 1)}
    assert set(sent) == neighbours | {(target, source) for source, target in neighbours}, set(sent)
    if args.data > 1:
        rows = [spec[:1] for found in sent.values() for spec in found]
        assert all(first == ("data",) for first in rows), f"values between stages are sharded {rows}"


def specs_of_values(plan) -> dict:
    """The spec of every value that a task computes."""
    return {
        name: spec
        for program in plan.programs
        for run in program.runs
        for name, spec in zip(run.outputs, plan.executable(run.executable).out_specs, strict=True)
    }


def check_collectives(step, mesh, args: argparse.Namespace) -> None:
    """Checks that replicas sum gradients, and that forwards and single devices exchange nothing."""
    collectives = step.collectives()
    for stage, program in enumerate(step.plan.programs):
        found = [c for name in {run.executable for run in program.runs} for c in collectives[name]]
        summed = sorted({shape for c in found if c.operation == "all-reduce" for shape in c.shapes})
        print(f"group {stage}: all-reduces of {summed}")
        if args.model == 1:
            forwards = {run.executable for run in program.runs if str(run.task).startswith("fwd")}
            exchanged = {name: collectives[name] for name in forwards if collectives[name]}
            assert forwards and not exchanged, f"group {stage}: forwards exchange {exchanged}"
            print(f"group {stage}: no all-reduce in {', '.join(sorted(forwards))}")
        if args.data > 1:
            gradients = {shard_shape(leaf, mesh) for leaf in step.argument_leaves(0)[stage].values()}
            assert gradients <= {*summed}, f"group {stage} sums {summed}, not its gradients {gradients}"
        elif args.model == 1:
            assert not found, f"group {stage} has one device, and {found}"


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
    gradients = {"x": (x_gradients, expected_xs)}
    for name in ("w", "b"):
        gradients[name] = (
            [of_stage[name] for of_stage in param_gradients],
            [of_stage[name] for of_stage in expected_params],
        )
    for name, (actual, expected) in gradients.items():
        print(f"gradients of {name}: {[leaf.shape for leaf in jax.tree.leaves(actual)]}")
        common.assert_close(f"gradients of {name}", actual, expected, RELATIVE_LIMIT, absolute=LIMIT)
    common.assert_close("loss", loss, expected_loss, RELATIVE_LIMIT)


if __name__ == "__main__":
    main()
