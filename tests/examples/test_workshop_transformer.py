"""The collectives of the Workshop transformer: those that its strategies ought to have, and no more.

Counted in the programs that XLA compiled. That losses and parameters are those of plain JAX, the example
asserts itself.
"""

import collections

import jax
import pytest
from flax import nnx

from tests.support.collectives import collectives_of
from tests.support.parity import mesh_of

SIZES = "--layers 4 --hidden 16 --heads 4 --seq-len 8 --batch-size 8 --microbatches 2"
LAYERS_PER_STAGE = 2
# Of a microbatch of four sequences, on one of two devices along "data".
ACTIVATION = (2, 8, 16)
QKV, HIDDEN = (2, 8, 48), (2, 8, 64)
GATHERED = {"fwd": {ACTIVATION, QKV, HIDDEN}, "bwd": {ACTIVATION, HIDDEN}}

# The blocks of a layer are attention and the MLP. A tensor-parallel one sums its result in the forward and
# the gradient of its input in the backward. A sequence-parallel one gathers its input as well, and in the
# backward the gradient of its result. Its sums would best be reduce-scatters; XLA for CPUs makes each an
# all-reduce and a slice.
SUMS = {"all-reduce": 2}
SUMS_AND_GATHERS = {"all-reduce": 2, "all-gather": 2}
PER_LAYER = {
    "tensor parallel": (SUMS, SUMS),
    # Gathers what a column-parallel linear makes and, in the backward, the gradient of what a row-parallel
    # one reads.
    "gathered": (SUMS_AND_GATHERS, SUMS_AND_GATHERS),
    "sequence parallel": (SUMS_AND_GATHERS, SUMS_AND_GATHERS),
    # Attention's sum once more; the MLP's is the layer's result, which the backward does not need.
    "full checkpointing": (SUMS, {"all-reduce": 3}),
    # Of two layers together, all sums but the last once more.
    "checkpoints every 2 layers": (SUMS, {"all-reduce": 3.5}),
    # Each block's sum is its result: what enters the next block is kept, and no sum is computed once more.
    "checkpointed blocks": (SUMS, SUMS),
    "checkpointed attention": (SUMS, SUMS),
    "selective checkpointing": (SUMS, SUMS),
}


@pytest.fixture
def workshop(example):
    return example("workshop_transformer")


def compiled(workshop, strategy, **axes):
    """The collectives of one strategy's step in microbatches and outside, and the model's parameters."""
    args = workshop.parse_arguments(SIZES.split())
    with mesh_of(workshop.NUM_STAGES, **axes) as mesh:
        graphdef, state = workshop.init(args, strategy)
        step = workshop.pipelined(graphdef, state, workshop.make_batch(args), strategy, mesh)
        params = jax.tree.leaves(nnx.filter_state(state, nnx.Param))
        return *collectives_of(step, mesh), params


def count(found):
    """How many values each operation is done to; XLA combines some collectives into one."""
    return collections.Counter(collective.operation for collective in found for _ in collective.shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "per_layer"), PER_LAYER.items(), ids=PER_LAYER)
def test_microbatches_exchange_activations_and_steps_reduce_gradients(workshop, name, per_layer):
    in_loop, outside, params = compiled(workshop, workshop.STRATEGIES[name], data=2, model=2)
    for direction, expected in zip(("fwd", "bwd"), per_layer, strict=True):
        for stage in range(workshop.NUM_STAGES):
            found = in_loop.pop(f"{direction}_{stage}")
            assert count(found) == {op: LAYERS_PER_STAGE * number for op, number in expected.items()}
            shapes = {shape for collective in found for shape in collective.shapes}
            assert shapes == ({ACTIVATION} if name != "gathered" else GATHERED[direction])
    assert not in_loop
    # Each parameter's gradient once, and the loss.
    assert sum(map(count, outside.values()), collections.Counter()) == {"all-reduce": len(params) + 1}


@pytest.mark.slow
def test_data_parallel_microbatches_exchange_nothing(workshop):
    in_loop, outside, params = compiled(workshop, workshop.Strategy(), data=2, model=1)
    assert in_loop and not any(in_loop.values())
    assert sum(map(count, outside.values()), collections.Counter()) == {"all-reduce": len(params) + 1}


def residual_bytes(workshop, strategy):
    """The bytes that the forward of two layers keeps for the backward, weights included."""
    args = workshop.parse_arguments(["--layers", "2", *SIZES.split()[2:]])
    definition, params = nnx.split(nnx.merge(*workshop.init(args, strategy))[0])
    x = workshop.make_batch(args)[0][0]

    def pull_back(params):
        return jax.vjp(lambda params: nnx.merge(definition, params)(x), params)[1]

    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)):
        return sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(pull_back, params))
        )


def test_each_checkpointed_block_keeps_less(workshop):
    names = ("tensor parallel", "checkpointed attention", "checkpointed blocks")
    kept = [residual_bytes(workshop, workshop.STRATEGIES[name]) for name in names]
    assert kept[0] > kept[1] > kept[2], kept
