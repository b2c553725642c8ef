"""Train steps as users of model libraries write them, with what these have for state, scales and metrics."""

import warnings

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpmd
from tests.support.models import drawn, keys
from tests.support.programs.table import Case, program

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of names that these take from JAX
    import haiku as hk
    import jmp

VOCABULARY, WIDTH, CLASSES, STAGES = 8, 4, 3, 3
HALF = jmp.get_policy("params=float32,compute=float16,output=float32")


def sentences(microbatches=4, rows=2, length=6):
    return jax.random.randint(keys(1)[0], (microbatches * rows, length), 0, VOCABULARY)


def examples(microbatches=4, rows=4):
    """Points, and classes that depend on them."""
    x = jax.random.normal(keys(1)[0], (microbatches * rows, WIDTH))
    return x, jnp.argmax(x[:, :CLASSES], -1)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def marked(x, layer, stages=STAGES):
    """Ends a stage after each of the layers but the last."""
    return mpmd.mark_stage_end(x) if layer < stages - 1 else x


class DecoderLayer(hk.Module):
    """A haiku module, which a policy of jmp's has compute in half precision."""

    def __call__(self, h):
        mask = jnp.tri(h.shape[1], dtype=bool)[None, None]
        attention = hk.MultiHeadAttention(2, WIDTH // 2, w_init=hk.initializers.VarianceScaling(1.0))
        normalised = hk.LayerNorm(-1, create_scale=True, create_offset=True)(h)
        h = h + attention(normalised, normalised, normalised, mask=mask)
        return h + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(h)))


hk.mixed_precision.set_policy(DecoderLayer, HALF)


@program()
def haiku_transformer_with_a_dynamic_loss_scale():
    """The first step is skipped: the scale makes its gradients infinite in half precision."""
    optimizer = optax.adam(1e-2, eps=1e-3)

    def forward(tokens):
        h = hk.Embed(VOCABULARY, WIDTH)(tokens)
        h = mpmd.mark_stage_end(DecoderLayer()(h))
        h = DecoderLayer()(h)
        return hk.Linear(VOCABULARY)(h)

    model = hk.without_apply_rng(hk.transform(forward))

    def step(state, tokens):
        params, opt_state, scale = state

        def loss(params, tokens):
            return scale.scale(cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:]))

        value, grads = mpmd.treduce(
            lambda tokens: jax.value_and_grad(loss)(params, tokens),
            mpmd.microbatches(tokens, 4),
            schedule=mpmd.Std1F1B(2),
            operation=mpmd.Mean,
        )
        grads = scale.unscale(HALF.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        params, opt_state = jmp.select_tree(
            finite, (optax.apply_updates(params, updates), new_opt_state), (params, opt_state)
        )
        metrics = {"loss": scale.unscale(value), "scale": scale.loss_scale, "finite": finite}
        return (params, opt_state, scale.adjust(finite)), metrics

    tokens = sentences()
    params = drawn(model.init, keys(1)[0], tokens[:, :-1])
    scale = jmp.DynamicLossScale(jnp.float32(2.0**24), period=2, factor=2**14)
    return Case(step, (params, optimizer.init(params), scale), (tokens,), 2, steps=4, tolerance=1e-2)


class NnxClassifier(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES)])
        self.norms = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(STAGES)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = marked(jax.nn.relu(norm(layer(x))), i)
        return self.head(self.dropout(x))


@program()
def nnx_with_an_optimizer_and_metrics():
    """All that a microbatch changes but the parameters is carried: statistics, counts of keys, metrics."""
    model = NnxClassifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graph, state = nnx.split((model, optimizer, metrics))

    def step(state, x, y):
        model, optimizer, metrics = nnx.merge(graph, state)
        metrics.reset()
        trained, params, rest = nnx.split((model, metrics), nnx.Param, ...)

        def loss_and_gradients(rest, microbatch):
            model, metrics = nnx.merge(trained, params, rest, copy=True)
            x, y = microbatch

            def loss(model):
                logits = model(x)
                return cross_entropy(logits, y), logits

            (value, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model)
            metrics.update(loss=value, logits=logits, labels=y)
            return nnx.state((model, metrics), nnx.Not(nnx.Param)), grads

        rest, grads = mpmd.treduce(
            loss_and_gradients,
            mpmd.microbatches((x, y), 4),
            schedule=mpmd.Std1F1B(STAGES),
            operation=mpmd.Mean,
            carry=rest,
        )
        nnx.update((model, metrics), rest)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer, metrics)), metrics.compute()

    return Case(step, state, examples(), steps=3)
