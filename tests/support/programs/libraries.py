"""Flax linen and nnx models, written as their users write them."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import mpmd
from tests.support.models import WIDTH, batch
from tests.support.programs.auxiliary_outputs import Last
from tests.support.programs.table import Case, program, trains

ADAMW = optax.adamw(1e-2, eps=1e-3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(WIDTH)(x))
        return x + nn.Dropout(0.5, deterministic=not train)(nn.relu(h))


class Pipeline(nn.Module):
    """Blocks with a mark after each but the last."""

    block: nn.Module
    stages: int = 3

    @nn.compact
    def __call__(self, x, **options):
        for i in range(self.stages):
            x = self.block.clone(name=f"stage_{i}", parent=self)(x, **options)
            if i < self.stages - 1:
                x = mpmd.mark_stage_end(x)
        return x


class FullState(train_state.TrainState):
    batch_stats: dict
    key: jax.Array


@program()
def linen_with_batch_norm_and_dropout():
    model = Pipeline(Block())

    def step(state, xs, ys):
        key, sub = jax.random.split(state.key)

        def loss(params, i):
            h, updated = model.apply(
                {"params": params, "batch_stats": state.batch_stats},
                xs[i],
                rngs={"dropout": jax.random.fold_in(sub, i)},
                mutable=["batch_stats"],
            )
            return jnp.mean((h - ys[i]) ** 2), updated["batch_stats"]

        (total, statistics), grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss, has_aux=True)(state.params, i),
            len(xs),
            mpmd.Std1F1B(3),
            ((mpmd.Add, Last()), mpmd.Add),
        )
        state = state.apply_gradients(grads=grads, batch_stats=statistics, key=key)
        return state, (total, grads)

    def holds(loaded):
        homes = [leaf.mpmd_idxs for leaf in loaded.plan.inputs if "batch_stats" in leaf.path]
        assert homes == [(0,), (0,), (1,), (1,), (2,), (2,)]

    variables = model.init(jax.random.key(0), batch()[0][0], train=False)
    state = FullState.create(apply_fn=model.apply, tx=ADAMW, key=jax.random.key(1), **variables)
    return Case(step, state, batch(), holds=holds)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])

    def __call__(self, h):
        for i, layer in enumerate(self.layers):
            h = jnp.tanh(layer(h))
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return h


@program()
def nnx_with_an_optimizer():
    model = NnxModel(nnx.Rngs(0))
    graphdef, state = nnx.split((model, nnx.Optimizer(model, ADAMW, wrt=nnx.Param)))

    def step(state, xs, ys):
        model, optimizer = nnx.merge(graphdef, state)
        definition, params = nnx.split(model)

        def loss(params, x, y):
            return jnp.mean((nnx.merge(definition, params)(x) - y) ** 2)

        total, grads = trains(params, (xs, ys), loss)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], (total, grads)

    return Case(step, state, batch())
