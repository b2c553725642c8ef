"""Each strategy of the Workshop example has the shards and the collectives that it is known by.

Counted in the programs that XLA compiled. That loss and state are those of plain JAX, the example asserts
itself.
"""

import collections
import dataclasses

import jax
import pytest

from tests.support.collectives import collectives_of, count

SIZES = "--layers 3 --d-model 16 --seq-len 8 --heads 8 --batch-size 16 --simulate 1"
LAYERS = 3
MATRICES = 4 * LAYERS + 3  # with two embeddings and the head
QKV, MLP_OUT = (16, 48), (64, 16)

# Of a block its sum in the forward and that of its input's gradient in the backward, in each of two blocks of
# a layer; rows of the embedding that other devices have, and the gradient of what the head reads.
SUMS = 2 * LAYERS + 1


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a device has of two weights and of the tokens, and what devices exchange.

    Attributes:
      qkv, mlp_out, tokens: the shapes of its shards.
      activation: the shape of what is summed over devices in each microbatch, ``sums`` times in the forwards
        of all stages, and in the backwards.
      key: the shape of what is gathered in attention, of keys and of values.
      is_reduced: whether each gradient and the loss are reduced after the loop.
      gathers: how many weights are gathered before it.
    """

    qkv: tuple = QKV
    mlp_out: tuple = MLP_OUT
    tokens: tuple = (16, 8)
    activation: tuple = ()
    sums: int = 0
    key: tuple = ()
    is_reduced: bool = False
    gathers: int = 0


EXPECTED = {
    "accumulation": Expected(),
    "data": Expected(tokens=(2, 8), is_reduced=True),
    "FSDP": Expected((16, 6), (8, 16), (2, 8), is_reduced=True, gathers=MATRICES),
    "tensor": Expected((16, 12), (16, 16), activation=(16, 8, 16), sums=SUMS),
    "sequence": Expected(
        (16, 24), (32, 16), (8, 4), activation=(8, 4, 16), sums=SUMS, key=(8, 8, 4, 2), is_reduced=True
    ),
    "pipeline, 1F1B": Expected(),
    "full checkpointing": Expected(),
}


def compiled(name, example):
    """The example's step on its groups, the shards of its state and batch, and its collectives."""
    gpt, workshop = example("gpt"), example("workshop_strategies")
    args = workshop.parse_arguments(SIZES.split())
    config = gpt.GPTConfig(args.layers, args.d_model, args.heads, args.seq_len)
    state, batch = workshop.init(config), workshop.make_batch(args)
    choice = workshop.choose(workshop.STRATEGIES[name], config, state, batch, workshop.CLUSTER, args)
    with choice.mesh() as mesh:
        step = choice.jit(mesh, donate_argnums=()).compile(state, *batch)
        layer = step(state, *batch)[0]["params"]["blocks"][1]
        weights = [shard_of(layer[name]) for name in ("qkv", "mlp_out")]
        tokens = step.argument_leaves(1)
        submesh = mesh.unstack[tokens.placement.mpmd_idxs[0]]
        sharding = jax.sharding.NamedSharding(submesh, jax.sharding.PartitionSpec(*tokens.placement.spec))
        return *collectives_of(step, mesh), (*weights, sharding.shard_shape(batch[0].shape)), state["params"]


def shard_of(array):
    """The shape of what a device has of an array on groups of this process."""
    local = array.runtime.fetch(array.mpmd_idxs[0], array.handle).result()
    (shape,) = {shard.data.shape for shard in local.addressable_shards}
    return shape


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_shards_and_collectives(example, name):
    expected = EXPECTED[name]
    in_loop, outside, shards, params = compiled(name, example)
    assert shards == (expected.qkv, expected.mlp_out, expected.tokens)
    for direction in ("fwd", "bwd"):
        found = sum((count(c) for task, c in in_loop.items() if direction in task), collections.Counter())
        assert found.pop(("all-reduce", expected.activation), 0) == expected.sums
        assert found.pop(("all-gather", expected.key), 0) == (2 * LAYERS if expected.key else 0)
        # Beside them at most attention's partial gradients, and of each token a maximum, a sum and a score.
        assert all(operation == "all-reduce" for operation, _ in found)
        assert not found or expected.sums
    after = sum((count(found) for found in outside.values()), collections.Counter())
    by_operation = collections.Counter(operation for operation, _ in after.elements())
    assert by_operation["all-reduce"] == (len(jax.tree.leaves(params)) + 1 if expected.is_reduced else 0)
    assert by_operation["all-gather"] == expected.gathers
    assert set(by_operation) <= {"all-reduce", "all-gather"}
