"""A train step as users of a model library write it, with what it has for state, keys and metrics."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpmd
from tests.support.models import keys
from tests.support.programs.table import Case, program

WIDTH, CLASSES, STAGES = 4, 3, 3


def examples():
    """Points, and classes that depend on them."""
    x = jax.random.normal(keys(1)[0], (16, WIDTH))
    return x, jnp.argmax(x[:, :CLASSES], -1)


class NnxClassifier(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES)])
        self.norms = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(STAGES)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = jax.nn.relu(norm(layer(x)))
            x = mpmd.mark_stage_end(x) if i < STAGES - 1 else x
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
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

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
