"""The Workshop guide's other cases: a network of layer specifications, and 175 billion weights.

    python examples/workshop_models.py              in one process, on three fake devices
    python examples/workshop_models.py --ray        on three Ray actors

The network, a convolution and linear layers from 784 pixels to 10 classes, passes forward alone, and what it
returns is compared with plain ``jax.jit``. For the large model, of which there are shapes alone, a plan is
chosen on 64 devices of 40 GB, and nothing runs.
"""

import argparse
import functools
from collections.abc import Mapping, Sequence

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpmd
from mpmd.simulate import Link

LIMIT = 1e-6  # of the relative error of the outputs
SIDE = 28  # of an image of 784 pixels
STAGES = (
    (
        {"type": "conv", "in_channels": 1, "out_channels": 4, "kernel_size": (3, 3)},
        {"type": "linear", "in_features": 4 * SIDE**2, "out_features": 512},
    ),
    (
        {"type": "linear", "in_features": 512, "out_features": 256},
        {"type": "linear", "in_features": 256, "out_features": 256},
    ),
    (
        {"type": "linear", "in_features": 256, "out_features": 128},
        {"type": "linear", "in_features": 128, "out_features": 10},
    ),
)

# A100s of 40 GB: dense bfloat16, HBM2, NVLink, and 200 Gb/s between nodes.
A100_CLUSTER = mpmd.Cluster(
    nodes=8,
    devices_per_node=8,
    memory=40e9,
    flops=312e12 / 2,
    memory_bandwidth=1.5e12,
    device_link=Link(5e-6, 250e9),
    node_link=Link(2e-5, 25e9),
    task_overhead=2e-5,
)
OPTIMIZER = optax.adam(1e-4)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not args.ray:
        common.fake_devices(len(STAGES))
    if "network" in args.cases:
        run_network(args)
    if "175B" in args.cases:
        print_selection(select(args.layers, args.d_model, args.simulate))


class Network(nnx.Module):
    """Layers by their specifications; a stage for each list of them."""

    def __init__(self, stages: Sequence[Sequence[Mapping]], rngs: nnx.Rngs):
        self.stages = nnx.List(nnx.List(make_layer(spec, rngs) for spec in specs) for specs in stages)

    def __call__(self, x: jax.Array) -> jax.Array:
        for index, layers in enumerate(self.stages):
            for layer in layers:
                x = apply_layer(layer, x)
            if index < len(self.stages) - 1:
                x = mpmd.mark_stage_end(x)
        return x


def make_layer(spec: Mapping, rngs: nnx.Rngs) -> nnx.Linear | nnx.Conv:
    match spec:
        case {"type": "linear", "in_features": inputs, "out_features": outputs}:
            return nnx.Linear(inputs, outputs, rngs=rngs)
        case {"type": "conv", "in_channels": inputs, "out_channels": outputs, "kernel_size": size}:
            return nnx.Conv(inputs, outputs, size, rngs=rngs)
    raise ValueError(f"a layer is linear or conv, with its sizes, not {spec}")


def apply_layer(layer: nnx.Linear | nnx.Conv, x: jax.Array) -> jax.Array:
    """A convolution takes float32[batch, ...] as square images, a linear layer as features."""
    if isinstance(layer, nnx.Conv):
        return layer(x.reshape(len(x), SIDE, SIDE, layer.in_features))
    return layer(x.reshape(len(x), -1))


def forward(params: nnx.State, images: jax.Array, graphdef: nnx.GraphDef, microbatches: int) -> jax.Array:
    """The outputs, float32[batch, 10], of images, float32[batch, 784], by microbatches."""
    outputs = mpmd.treduce(
        nnx.merge(graphdef, params),
        mpmd.microbatches(images, microbatches),
        schedule=mpmd.ForwardOnly(num_stages=len(STAGES), mpmd_dim=len(STAGES)),
        operation=mpmd.Concat(0),
    )
    return outputs.reshape(len(images), -1)


def run_network(args: argparse.Namespace) -> None:
    graphdef, params = nnx.split(Network(STAGES, nnx.Rngs(0)))
    images = np.random.default_rng(0).standard_normal((args.batch_size, SIDE**2), np.float32)
    expected = jax.jit(nnx.merge(graphdef, params))(images)  # the whole batch at once
    step = functools.partial(forward, graphdef=graphdef, microbatches=args.microbatches)
    with common.open_mesh({"stage": len(STAGES)}, args.ray, args.address, transport=args.transport) as mesh:
        outputs = mpmd.jit(step, mesh)(params, images)
        print(f"Output shape: {outputs.shape}")
        common.assert_close("outputs", outputs, expected, LIMIT)


def select(layers: int, d_model: int, simulate: int) -> mpmd.Choice:
    """A plan for a step of Adam, in bfloat16, on 256 sequences of 2048 tokens, of a model as GPT-3."""
    tokens = jax.ShapeDtypeStruct((256, 2048), jnp.int32)
    return mpmd.plan(train_step, gpt3(layers, d_model), tokens, cluster=A100_CLUSTER, simulate=simulate)


def gpt3(layers: int, d_model: int) -> dict:
    """The shapes of weights and of Adam's moments; the layers are stacked, heads have 128 features."""

    def init():
        def zeros(*shape):
            return jnp.zeros(shape, jnp.bfloat16)

        params = {
            "embedding": zeros(50257, d_model),
            "layers": {
                "qkv": zeros(layers, d_model, 3, d_model // 128, 128),
                "attention_out": zeros(layers, d_model // 128, 128, d_model),
                "mlp_in": zeros(layers, d_model, 4 * d_model),
                "mlp_out": zeros(layers, 4 * d_model, d_model),
            },
        }
        return {"params": params, "moments": OPTIMIZER.init(params)}

    return jax.eval_shape(init)


def train_step(state: dict, tokens: jax.Array) -> tuple[dict, jax.Array]:
    loss, gradients = mpmd.value_and_grad(loss_fn)(state["params"], tokens)
    updates, moments = OPTIMIZER.update(gradients, state["moments"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    def layer(x, weights):
        query, key, value = jnp.moveaxis(jnp.einsum("bsd,dchf->bschf", norm(x), weights["qkv"]), 2, 0)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + jnp.einsum("bshf,hfd->bsd", attended, weights["attention_out"])
        return x + jax.nn.gelu(norm(x) @ weights["mlp_in"]) @ weights["mlp_out"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    scores = (norm(x) @ params["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens).mean()


def norm(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)


def print_selection(choice: mpmd.Choice) -> None:
    """Prints a choice as the guide does, and whether it fits."""
    groups, best = choice.launch["groups"], choice.best
    print(f"{choice}\n")
    print(f"Data parallel: {groups[0]['data']}")
    print(f"Tensor parallel: {groups[0]['model']}")
    print(f"Pipeline parallel: {len(groups)} groups, {choice.candidate.schedule.num_stages} stages")
    needed = best.prediction.memory.total
    if not needed <= choice.cluster.memory:
        raise AssertionError(f"the choice needs {needed} bytes of a device")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common.add_mesh_arguments(parser)
    add = parser.add_argument
    cases = ["network", "175B"]
    add("--cases", nargs="+", choices=cases, default=cases, help="those to run; by default both")
    add("--batch-size", type=int, default=32)
    add("--microbatches", type=int, default=4)
    add("--layers", type=int, default=96, help="of the large model (default: 96)")
    add("--d-model", type=int, default=12288, help="of the large model, a multiple of 128 (default: 12288)")
    add("--simulate", type=int, default=1, help="candidates of which the plans are simulated (default: 1)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
