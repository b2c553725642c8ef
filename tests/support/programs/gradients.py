"""Steps of whole batches, which ``mpmd.value_and_grad`` cuts into microbatches.

That these compute in plain JAX what ``jax.value_and_grad`` does of the whole batch is tested by itself.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import CLIPPED_ADAM, WIDTH, batch, init, layer, mse, weights
from tests.support.programs.table import Case, program

ROWS, VOCABULARY, LENGTH = 16, 8, 6


def rows():
    """The inputs and targets of a batch, one row each."""
    return tuple(microbatches.reshape(ROWS, WIDTH) for microbatches in batch())


def sentences():
    """The tokens and the lengths of 16 sentences; the sentences of one of four microbatches are empty."""
    tokens = jax.random.randint(jax.random.key(5), (ROWS, LENGTH), 0, VOCABULARY)
    return tokens, jnp.array([6, 6, 5, 6, 3, 1, 2, 4, 0, 0, 0, 0, 2, 0, 1, 0])


def train(loss, params, data=None, optimizer=CLIPPED_ADAM, stages=2, case=None, **options):
    """Trains ``params`` by the gradients of a loss in four microbatches."""
    data = rows() if data is None else data
    options = {"num_microbatches": 4, "schedule": mpmd.Std1F1B(stages), **options}

    def step(state, *data):
        params, opt_state = state
        value, grads = mpmd.value_and_grad(loss, **options)(params, *data)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (value, grads)

    return Case(step, init(params, optimizer), data, stages, **(case or {}))


@program({"mean": "mean", "sum": "sum"}, usual={"sum"})
def reductions(reduction):
    def loss(params, x, y):
        return mse(params, x, y) * (len(x) if reduction == "sum" else 1)

    return train(loss, weights(2), reduction=reduction)


@program({"1F1B": mpmd.Std1F1B(3), "zero bubble": mpmd.ZeroBubble(3), "interleaved": mpmd.KimiK2(4, 2)})
def schedules(schedule):
    case = {"groups": schedule.mpmd_dim}
    made = train(mse, weights(schedule.num_stages), stages=schedule.num_stages, schedule=schedule)
    return Case(made.step, made.state, made.batch, **case)


@program(on_ray=True)
def rows_sharded_within_groups():
    """The step cuts them, and they stay sharded."""

    def holds(loaded):
        task = loaded.plan.executable("fwd_0")
        assert (None, "fsdp") in task.in_specs

    specs = {"in_specs": (P(), P("fsdp"), P("fsdp"))}
    return train(mse, weights(2), case={"axes": {"fsdp": 2}, "options": specs, "holds": holds})


def language_model_loss(params, tokens, lengths):
    """The mean over the tokens that are not padding; 0/0 where all are."""
    h = params["table"][tokens]
    h = mpmd.mark_stage_end(layer(params["first"], h))
    logits = layer(params["last"], h) @ params["table"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1))
    counted = jnp.arange(LENGTH) < lengths[:, None]
    return jnp.sum(jnp.where(counted, losses, 0)) / jnp.sum(counted)


def tokens_in(params, tokens, lengths):
    return jnp.sum(lengths)


def language_model():
    first, last = weights(2)
    table = jax.random.normal(jax.random.key(4), (VOCABULARY, WIDTH))
    return {"table": table, "first": first, "last": last}


@program(usual=True)
def weights_by_tokens():
    """A microbatch of empty sentences counts nothing."""
    return train(language_model_loss, language_model(), sentences(), reduction=tokens_in)


@program({"bfloat16": jnp.bfloat16, "float16": jnp.float16})
def weights_by_tokens_in_half_precision(dtype):
    def loss(params, tokens, lengths):
        return language_model_loss(jax.tree.map(lambda p: p.astype(dtype), params), tokens, lengths)

    made = train(loss, language_model(), sentences(), optimizer=optax.sgd(0.1), reduction=tokens_in)
    return Case(made.step, made.state, made.batch, 2, tolerance=5e-2)


@program()
def weights_by_example():
    def loss(params, batch):
        losses = jnp.mean((layer(params[1], mpmd.mark_stage_end(layer(params[0], batch["x"])))) ** 2, 1)
        return jnp.sum(losses * batch["weight"]) / jnp.sum(batch["weight"])

    data = {"x": rows()[0], "weight": jnp.linspace(0.1, 3, ROWS)}
    return train(loss, weights(2), (data,), reduction=lambda params, batch: jnp.sum(batch["weight"]))


def loss_with_aux(params, x, y):
    h = mpmd.mark_stage_end(layer(params[0], x))
    out = layer(params[1], h)
    aux = {
        "scores": jnp.sum(out, 1),
        "classes": jnp.argmax(out, 1),
        "features": out.T,
        "norms": {"hidden": jnp.mean(h**2), "out": jnp.mean(out**2)},
        "largest": jnp.max(out),
        "right": jnp.sum(jnp.argmax(out, 1) == jnp.argmax(y, 1)),
    }
    return jnp.mean((out - y) ** 2), aux


@program({"mean": "mean", "weights": lambda params, x, y: jnp.sum(x > 0)}, on_ray={"weights"})
def auxiliary_output_concatenated_and_reduced(reduction):
    rules = {
        "scores": None,
        "classes": None,
        "features": None,
        "norms": {"hidden": None, "out": mpmd.Concat()},
        "largest": mpmd.Max,
        "right": mpmd.Add,
    }
    options = {"has_aux": True, "aux_reduction": rules, "reduction": reduction}
    return train(loss_with_aux, weights(2), **options)


@program()
def several_arguments():
    """An encoder and a decoder that are arguments of their own, and a scale that is not of the batch."""

    def loss(x, encoder, y, decoder, *, scale):
        h = mpmd.mark_stage_end(layer(encoder, x))
        return scale * jnp.mean((layer(decoder, h) - y) ** 2)

    def step(state, x, y):
        encoder, decoder, scale = state
        differentiate = mpmd.value_and_grad(
            loss, (3, 1), num_microbatches=4, schedule=mpmd.Std1F1B(2), batch_argnums=(0, 2)
        )
        value, grads = differentiate(x, encoder, y, decoder, scale=scale)
        decoder, encoder = jax.tree.map(lambda p, g: p - 0.1 * g, (decoder, encoder), grads)
        return (encoder, decoder, scale), value

    return Case(step, (*weights(2), jnp.float32(0.5)), rows(), 2)


@program()
def one_key_for_all_microbatches_and_one_for_each_row():
    def loss(params, x, y, key, keys):
        kept = jax.random.bernoulli(key, 0.8, (WIDTH,))
        noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
        h = mpmd.mark_stage_end(layer(params[0], jnp.where(kept, x, 0)))
        return jnp.mean((layer(params[1], h + noise) - y) ** 2)

    keys = jax.random.split(jax.random.key(1), ROWS)
    return train(
        loss, weights(2), (*rows(), jax.random.key(0), keys), case={"warns": "draws the same random numbers"}
    )


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = x + nn.gelu(nn.Dense(WIDTH)(nn.LayerNorm()(x)))
            if i in mpmd.stage_ends(3, 3):
                x = mpmd.mark_stage_end(x)
        return nn.Dense(3)(x)


@program(usual=True)
def flax_train_state():
    """The step of flax's guide, with that one word changed, and its metrics."""
    model = Network()

    def step(state, batch):
        def loss_fn(params, batch):
            logits = state.apply_fn({"params": params}, batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (logits, jnp.mean(jnp.argmax(logits, -1) == batch["label"]))

        grad_fn = mpmd.value_and_grad(loss_fn, has_aux=True, num_microbatches=4, schedule=mpmd.Std1F1B(3))
        (loss, (logits, accuracy)), grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), (loss, logits, accuracy)

    x, y = rows()
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))
    return Case(step, state, ({"image": x, "label": jnp.argmax(y[:, :3], 1)},))


@program()
def equinox_modules():
    model = eqx.nn.MLP(WIDTH, WIDTH, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x, y):
        model = eqx.combine(params, static)
        for i, one in enumerate(model.layers):
            x = jax.vmap(one)(x)
            if i < 2:
                x = mpmd.mark_stage_end(jax.nn.relu(x))
        return jnp.mean((x - y) ** 2)

    return train(loss, params, stages=3)


@program({"none": None, "rematerialized": jax.checkpoint}, usual={"rematerialized"})
def scanned_layers(remat):
    """Each group holds its layers, also of the gradients."""
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights(6))

    def body(h, one):
        return mpmd.mark_stage_end(h + layer(one, h), num_stages=2), None

    def loss(params, x, y):
        h, _ = lax.scan(remat(body) if remat else body, x, params)
        return jnp.mean((h - y) ** 2)

    return train(loss, layers)
