"""JaxPP's tutorial, cell by cell at small sizes, of which ``jaxpp`` is another module.

It differs where it shows what a step consists of: ``plan`` and ``copies`` not a jaxpr and a private dict.
"""

import time
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import mpmd

jaxpp = SimpleNamespace(api=mpmd)
pipeline_yield = jaxpp.api.pipeline_enter_stage

NUM_MB = 4
NUM_STAGES = 4
BATCH_SIZE = 8
SEQ_LEN = 4
D_MODEL = 64
NUM_LAYERS = 8


class Block(nn.Module):
    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=8, qkv_features=D_MODEL // 8)(x)
        x = nn.LayerNorm()(x)
        hidden = nn.gelu(nn.Dense(features=4 * D_MODEL)(x))
        return nn.LayerNorm()(x + nn.Dense(features=x.shape[-1])(hidden))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(NUM_LAYERS):
            x = Block(name=f"block_{i}")(x)
        return x


class AnnotatedTransformer(nn.Module):
    num_stages: int

    @nn.compact
    def __call__(self, x):
        for i in range(NUM_LAYERS):
            x = Block(name=f"block_{i}")(x)
            if (i + 1) % (NUM_LAYERS // self.num_stages) == 0:
                x = pipeline_yield(x)
        return x


def init_state(model, dummy_input):
    params = model.init(jax.random.PRNGKey(0), dummy_input)["params"]
    optimizer = optax.adamw(learning_rate=0.001)
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def loss_fn(state, params, x, targets):
    x, targets = jax.lax.with_sharding_constraint((x, targets), P("fsdp"))
    return jnp.mean((state.apply_fn({"params": params}, x) - targets) ** 2)


def in_microbatches(xs, targets):
    return xs.reshape(NUM_MB, -1, *xs.shape[1:]), targets.reshape(NUM_MB, -1, *targets.shape[1:])


def spmd_train_step(state, xs, targets):
    grad_fn = jax.value_and_grad(partial(loss_fn, state))

    def scan_fn(carry, in_):
        return jax.tree.map(jnp.add, carry, grad_fn(state.params, *in_)), ()

    zeros = jax.tree.map(jnp.zeros_like, (0.0, state.params))
    (loss_acc, grads_acc), _ = jax.lax.scan(scan_fn, zeros, in_microbatches(xs, targets))
    return state.apply_gradients(grads=grads_acc), loss_acc


def train_step(state, xs, targets, schedule):
    grad_fn = jax.value_and_grad(partial(loss_fn, state))

    def scan_fn(in_):
        x, targets = in_
        return grad_fn(state.params, x, targets)

    loss_acc, grads_acc = jaxpp.api.treduce(
        scan_fn,
        in_microbatches(xs, targets),
        schedule=schedule,
        operation=jaxpp.api.Add,
    )
    return state.apply_gradients(grads=grads_acc), loss_acc


def train_with_progress(train_step, inputs, num_steps=6):
    updated_state, x, targets = inputs
    updated_state, training_loss = train_step(updated_state, x, targets)
    updated_state, training_loss = train_step(updated_state, x, targets)
    jax.block_until_ready(updated_state)

    start_time = time.perf_counter()
    for i in range(2, num_steps - 1):
        updated_state, training_loss = train_step(updated_state, x, targets)
        if i % 2 == 1:
            print(f"Training loss after step {i + 1}: {training_loss}")
    jax.block_until_ready(updated_state)
    end_time = time.perf_counter()

    jax.profiler.start_trace("./tutorial-trace")
    updated_state, training_loss = train_step(updated_state, x, targets)
    jax.block_until_ready(updated_state)
    jax.profiler.stop_trace()

    print(f"Final training loss: {training_loss}")
    print(f"Training took: {end_time - start_time:.2f} seconds")
    return updated_state, float(training_loss)


def fsdp_in_shardings(mesh, state):
    return (
        jax.tree.map(
            lambda leaf: jax.NamedSharding(mesh, P("fsdp") if len(getattr(leaf, "shape", [])) > 0 else P()),
            state,
        ),
        jax.NamedSharding(mesh, P("fsdp")),
        jax.NamedSharding(mesh, P("fsdp")),
    )


def main():
    dummy_input = jnp.ones((BATCH_SIZE, SEQ_LEN, D_MODEL))
    state = init_state(Transformer(), dummy_input)
    inputs = (state, dummy_input, dummy_input)

    mesh = jax.sharding.Mesh(np.array(jax.devices())[:4], ("fsdp",))
    in_shardings = fsdp_in_shardings(mesh, state)
    with mesh:
        jitted_train_step = jax.jit(
            spmd_train_step, in_shardings=in_shardings, out_shardings=(in_shardings[0], None)
        )
        compiled = jitted_train_step.lower(*inputs).compile()
    sharded_inputs = jax.device_put(inputs, in_shardings)
    _, expected_loss = train_with_progress(compiled, sharded_inputs)

    mesh = jax.sharding.Mesh(np.array(jax.devices())[:NUM_STAGES].reshape(NUM_STAGES, -1), ("stage", "fsdp"))
    mpmd_mesh = jaxpp.api.MpmdMesh(mesh, "stage")
    assert [submesh.devices.item() for submesh in mpmd_mesh.unstack] == jax.devices()[:NUM_STAGES]
    for num_stages in (NUM_STAGES, NUM_LAYERS):
        updated_state, loss = train_pipelined(mesh, mpmd_mesh, num_stages, inputs)
        # Where gradients are rounding, AdamW's steps go either way: the tutorial's losses differ as much.
        assert abs(loss - expected_loss) < 1e-3 * expected_loss, (loss, expected_loss)
        for i in range(NUM_LAYERS):
            kernel = updated_state.params[f"block_{i}"]["Dense_0"]["kernel"]
            print(f"layer_{i}", kernel)
            assert kernel.mpmd_idxs == (i // (NUM_LAYERS // num_stages) % NUM_STAGES,)
        copies = updated_state.step.copies
        assert {group: int(copy.value) for group, copy in copies.items()} == dict.fromkeys(range(4), 6)
        devices = [copy.sharding.mesh.devices.item() for copy in copies.values()]
        assert devices == jax.devices()[:NUM_STAGES], devices


def train_pipelined(mesh, mpmd_mesh, num_stages, inputs):
    ann_transformer = AnnotatedTransformer(num_stages=num_stages)
    ann_state = init_state(ann_transformer, inputs[1])
    inputs = (ann_state, *inputs[1:])
    mpmd_in_specs = jax.tree.map(lambda sharding: sharding.spec, fsdp_in_shardings(mesh, ann_state))
    schedule = jaxpp.api.Interleaved1F1B(num_stages=num_stages, mpmd_dim=NUM_STAGES)
    pp_train_step = jaxpp.api.mpmd_jit_with_loop(
        partial(train_step, schedule=schedule),
        in_specs=mpmd_in_specs,
        out_specs=(mpmd_in_specs[0], jax.sharding.PartitionSpec()),
        mpmd_mesh=mpmd_mesh,
    ).compile(*inputs)
    for mpmd_rank, tasks in enumerate(schedule.tasks(NUM_MB)):
        lines = str(pp_train_step.plan.programs[mpmd_rank]).splitlines()
        assert sum(
            " = run fwd_" in line or " = run bwd_" in line or " = run Fused" in line for line in lines
        ) == len(tasks)
    with mesh:
        return train_with_progress(pp_train_step, inputs)
