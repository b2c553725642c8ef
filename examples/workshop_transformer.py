"""The Workshop guide's strategies: a flax transformer on data 2 x model 2 x stages 2.

    python examples/workshop_transformer.py              in one process, on eight fake devices
    python examples/workshop_transformer.py --ray        on two Ray actors of four devices each

Layers are tensor parallel, with what is between two linears split or gathered, then sequence parallel as
well, then checkpointed in full, two at a time, block by block, and by a policy. Losses and parameters of each
are compared with plain ``jax.jit`` of the tensor-parallel step on one device.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpmd

NUM_STAGES = 2
LIMIT = 5e-5  # of the relative error of a leaf

# Adam divides by the size of the gradient. The key's bias has none but rounding, which this epsilon hides.
OPTIMIZER = optax.adamw(1e-2, eps=1e-4)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The way in which a layer keeps its activations.

    Attributes:
      sequence_parallel: between blocks, split along the sequence.
      gathered: between the two linears of a block, whole on each device.
      remat: what rematerializes layers.
      every: how many layers are rematerialized together: only what enters the first of them is kept.
      blocks: the blocks of each layer that are rematerialized, each apart: ``"attention"``, ``"mlp"``.
    """

    sequence_parallel: bool = False
    gathered: bool = False
    remat: Callable = lambda layers: layers
    every: int = 1
    blocks: tuple[str, ...] = ()


STRATEGIES = {
    "tensor parallel": Strategy(),
    "gathered": Strategy(gathered=True),
    "sequence parallel": Strategy(sequence_parallel=True),
    "full checkpointing": Strategy(remat=nnx.remat),
    "checkpoints every 2 layers": Strategy(remat=nnx.remat, every=2),
    # Keeps what enters a block, so that no sum over devices is computed again.
    "checkpointed blocks": Strategy(blocks=("attention", "mlp")),
    "checkpointed attention": Strategy(blocks=("attention",)),
    # Keeps what the linears make, and computes attention's scores and weights again.
    "selective checkpointing": Strategy(
        remat=nnx.remat(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    ),
}


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    axes = common.mesh_axes(args, NUM_STAGES)
    if not args.ray:
        common.fake_devices(math.prod(axes.values()))
    batch = make_batch(args)
    with common.open_mesh(axes, args.ray, args.address, args.processes, args.transport) as mesh:
        graphdef, state = init(args, Strategy())
        expected = train(plain_jax(graphdef), state, batch, args.steps)
        for name in args.strategies or STRATEGIES:
            strategy = STRATEGIES[name]
            graphdef, state = init(args, strategy)
            step = pipelined(graphdef, state, batch, strategy, mesh)
            actual = train(step, state, batch, args.steps)
            common.assert_close(f"{name}: losses", actual[1], expected[1], LIMIT)
            common.assert_close(f"{name}: parameters and moments", actual[0], expected[0], LIMIT)


class ColumnParallelLinear(nnx.Linear):
    """A linear layer that makes a share of its outputs on each device along ``"model"``.

    With ``gather_output`` each device then gets the shares of the others as well.
    """

    def __init__(self, in_features: int, out_features: int, rngs: nnx.Rngs, gather_output: bool = True):
        super().__init__(
            in_features,
            out_features,
            kernel_metadata={"out_sharding": (None, "model")},
            bias_metadata={"out_sharding": ("model",)},
            rngs=rngs,
        )
        self.gather_output = gather_output

    def __call__(self, x: jax.Array) -> jax.Array:
        outputs = split(super().__call__(x))
        return whole(outputs) if self.gather_output else outputs


class RowParallelLinear(nnx.Linear):
    """A linear layer that reads a share of its inputs on each device along ``"model"``, and sums.

    Unless ``input_is_parallel``, each device has all inputs, and takes its share.
    """

    def __init__(self, in_features: int, out_features: int, rngs: nnx.Rngs, input_is_parallel: bool = True):
        kernel_metadata = {"out_sharding": ("model", None)}
        super().__init__(in_features, out_features, kernel_metadata=kernel_metadata, rngs=rngs)
        self.input_is_parallel = input_is_parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        inputs = x if self.input_is_parallel else whole(x)
        return whole(super().__call__(split(inputs)))


def whole(x: jax.Array) -> jax.Array:
    """Gathers, or sums, what is split or partial along ``"model"``."""
    return with_sharding_constraint(x, P("data"))


def split(x: jax.Array) -> jax.Array:
    """Splits the features of float32[batch, seq_len, features] along ``"model"``."""
    return with_sharding_constraint(x, P("data", None, "model"))


class TransformerLayer(nnx.Module):
    """A pre-norm layer over float32[batch, seq_len, hidden], with heads and hidden units along ``"model"``.

    Tensor parallel, a block ends with an all-reduce, and between blocks values are whole (Shoeybi et al.
    2019, section 3). Sequence parallel, they are split along the sequence there: a block gathers what it
    reads, and scatters its sum (Korthikanti et al. 2022, section 4.2.2). Gathered, each device computes all
    heads and hidden units between the two linears of a block, and the linears alone are parallel.
    """

    def __init__(self, hidden: int, num_heads: int, strategy: Strategy, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.sequence_parallel = strategy.sequence_parallel
        self.checkpointed = strategy.blocks
        column = functools.partial(ColumnParallelLinear, rngs=rngs, gather_output=strategy.gathered)
        row = functools.partial(RowParallelLinear, rngs=rngs, input_is_parallel=not strategy.gathered)
        self.attention_norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.qkv = column(hidden, 3 * hidden)
        self.attention_out = row(hidden, hidden)
        self.mlp_norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.mlp_in = column(hidden, 4 * hidden)
        self.mlp_out = row(4 * hidden, hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        for name, norm in (("attention", self.attention_norm), ("mlp", self.mlp_norm)):
            forward = functools.partial(self.forward, norm, getattr(self, name))
            x = jax.checkpoint(forward)(x) if name in self.checkpointed else forward(x)
        return x

    def forward(self, norm: nnx.LayerNorm, block: Callable, x: jax.Array) -> jax.Array:
        """One block behind its norm, and the residual."""
        return x + self.between(block(whole(self.between(norm(x)))))

    def between(self, x: jax.Array) -> jax.Array:
        """Splits ``x``. Both sides of a block's border are said: the gradient crosses it the other way."""
        spec = P("data", "model") if self.sequence_parallel else P("data")
        return with_sharding_constraint(x, spec)

    def attention(self, x: jax.Array) -> jax.Array:
        # Heads are the major part of the columns, so that each device has whole heads: query, key and value.
        qkv = self.qkv(x).reshape(*x.shape[:2], self.num_heads, -1)
        return self.attention_out(jax.nn.dot_product_attention(*jnp.split(qkv, 3, -1)).reshape(x.shape))

    def mlp(self, x: jax.Array) -> jax.Array:
        return self.mlp_out(nnx.gelu(self.mlp_in(x)))


class Transformer(nnx.Module):
    """Layers spread evenly over the stages."""

    def __init__(self, args: argparse.Namespace, strategy: Strategy, rngs: nnx.Rngs):
        self.remat = strategy.remat
        self.every = strategy.every
        self.layers = nnx.List(
            TransformerLayer(args.hidden, args.heads, strategy, rngs) for _ in range(args.layers)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        apply = self.remat(apply_layers)
        per_stage = len(self.layers) // NUM_STAGES
        for stage in range(NUM_STAGES):
            layers = tuple(self.layers)[stage * per_stage : (stage + 1) * per_stage]
            for first in range(0, per_stage, self.every):
                x = apply(layers[first : first + self.every], x)
            if stage < NUM_STAGES - 1:
                x = mpmd.mark_stage_end(x)
        return x


def apply_layers(layers: Sequence[TransformerLayer], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = layer(x)
    return x


def init(args: argparse.Namespace, strategy: Strategy) -> tuple[nnx.GraphDef, nnx.State]:
    """The model and its optimizer, the same numbers for any strategy."""
    with nnx.use_eager_sharding(False):  # the step's in_shardings place the parameters
        model = Transformer(args, strategy, nnx.Rngs(0))
        return nnx.split((model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)))


def make_batch(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, each float32[microbatches, microbatch_size, seq_len, hidden]."""
    shape = (args.microbatches, args.batch_size // args.microbatches, args.seq_len, args.hidden)
    inputs, targets = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    return inputs, targets


def train_step(state: nnx.State, inputs, targets, graphdef: nnx.GraphDef):
    """One step of AdamW with the mean gradient over the microbatches; the new state and the mean loss."""
    model, optimizer = nnx.merge(graphdef, state)
    definition, params = nnx.split(model)

    def loss(params, x, target):
        return jnp.mean((nnx.merge(definition, params)(x) - target) ** 2)

    mean_loss, gradients = mpmd.treduce(
        lambda microbatch: jax.value_and_grad(loss)(params, *microbatch),
        (inputs, targets),
        schedule=mpmd.Std1F1B(NUM_STAGES),
        operation=mpmd.Mean,
    )
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer)), mean_loss


def plain_jax(graphdef: nnx.GraphDef):
    """The step on one device, where ``treduce`` is a scan and a mark the identity."""
    step = jax.jit(functools.partial(train_step, graphdef=graphdef))

    def run(*inputs):
        with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), (AxisType.Auto,) * 2)):
            return step(*inputs)

    return run


def pipelined(graphdef: nnx.GraphDef, state: nnx.State, batch, strategy: Strategy, mesh):
    """The step compiled for the groups of ``mesh``; optimizer states are sharded like their parameters."""
    specs = nnx.get_partition_spec(state)
    batch_spec = P(None, "data", "model") if strategy.sequence_parallel else P(None, "data")
    return mpmd.jit(
        functools.partial(train_step, graphdef=graphdef),
        mpmd_mesh=mesh,
        in_shardings=(specs, batch_spec, batch_spec),
        out_shardings=(specs, P()),
    ).compile(state, *batch)


def train(step, state: nnx.State, batch, num_steps: int):
    """The state after some steps, as nested dicts, and the loss of each."""
    losses = []
    for _ in range(num_steps):
        state, loss = step(state, *batch)
        losses.append(loss)
    return nnx.to_pure_dict(state), [float(loss) for loss in losses]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common.add_mesh_arguments(parser)
    common.add_group_arguments(parser, data=2, model=2)
    add = parser.add_argument
    add("--strategies", nargs="+", choices=STRATEGIES, help="those to run; by default all")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--seq-len", type=int, default=32)
    add("--batch-size", type=int, default=8)
    add("--microbatches", type=int, default=4)
    add("--steps", type=int, default=3)
    args = parser.parse_args(argv)
    common.check_group_arguments(parser, args, args.ray)
    if args.layers % NUM_STAGES:
        parser.error(f"--layers {args.layers} is not a multiple of {NUM_STAGES} stages")
    if args.batch_size % (args.microbatches * args.data):
        parser.error("--batch-size is not a multiple of --microbatches times --data")
    if args.heads % args.model or args.seq_len % args.model or args.hidden % args.heads:
        parser.error("--heads and --seq-len must be multiples of --model, and --hidden one of --heads")
    return args


if __name__ == "__main__":
    main()
