"""The collectives of the demo's groups of several devices: Megatron's, and no more.

That its losses are those of plain JAX, the example asserts itself.
"""

import jax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.collectives import collectives_of, count
from tests.support.parity import mesh_of

SIZES = "--stages 2 --layers 2 --d-model 16 --heads 4 --seq-len 8 --batch-size 8 --microbatches 2"


def test_devices_along_model_share_each_block_and_those_along_data_the_batch(example):
    train_gpt = example("train_gpt")
    args, config, schedule = train_gpt.parse_arguments(SIZES.split())
    optimizer = train_gpt.make_optimizer(args.learning_rate, args.steps)
    step = train_gpt.make_train_step(config, optimizer, schedule)
    state = jax.eval_shape(lambda: train_gpt.init_state(0, config, optimizer))
    specs = train_gpt.state_specs(config, optimizer, state)
    tokens = jax.ShapeDtypeStruct((2, 4, 8), jax.numpy.int32)
    with mesh_of(2, data=2, model=2) as mesh:
        batch_spec = P(None, "data")
        step = mpmd.jit(step, mesh, in_specs=(specs, batch_spec, batch_spec))
        in_loop, outside = collectives_of(step.compile(state, tokens, tokens), mesh)
    # The results of attention and of the MLP, or their gradients.
    of_a_layer = {("all-reduce", (2, 8, 16)): 2}
    for name in ("fwd_0", "fwd_1", "bwd_0", "bwd_1"):
        assert count(in_loop.pop(name)) == of_a_layer, name
    assert not in_loop
    assert {operation for found in outside.values() for operation, _ in count(found)} == {"all-reduce"}
