"""Auxiliary outputs of the loss, under all operations."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

import mpmd
from tests.support.models import batch, layer, mlp, weights
from tests.support.programs.table import Case, descend, loop, program


def with_aux(loss, operation, stages=3, params=None, **of_case):
    """Trains on the first of what ``loss`` returns; ``operation`` accumulates the second."""

    def step(state, xs, ys):
        (total, aux), grads = loop(
            lambda x, y: jax.value_and_grad(loss, has_aux=True)(state, x, y),
            (xs, ys),
            stages,
            ((mpmd.Add, operation), mpmd.Add),
        )
        return descend(state, grads), (total, aux, grads)

    return Case(step, params or weights(stages), batch(), stages, **of_case)


class Last:
    """Keeps the value of the last microbatch."""

    def state(self, n, a):
        return jnp.zeros(a.shape, a.dtype)

    def update(self, state, update, index):
        return update


class RunningMean(Last):
    def update(self, state, update, index):
        return state + (update - state) / (index + 1)


class LogSumExp(Last):
    def state(self, n, a):
        return jnp.full(a.shape, -jnp.inf, a.dtype)

    def update(self, state, update, index):
        return jnp.logaddexp(state, update)


class Initial(Last):
    """Never updates the state."""

    def update(self, state, update, index):
        return state


class Histogram:
    """A state of another shape and dtype than the values."""

    def state(self, n, a):
        return jnp.zeros(3, jnp.int32)

    def update(self, state, update, index):
        return state.at[jnp.clip(jnp.int32(update * 3), 0, 2)].add(1)


OPERATIONS = {
    "add": (mpmd.Add, lambda h: jnp.sum(h)),
    "max": (mpmd.Max, lambda h: jnp.max(h)),
    "max of integers": (mpmd.Max, lambda h: jnp.argmax(h, -1)),
    "max of booleans": (mpmd.Max, lambda h: jnp.any(h > 0.9)),
    "concat": (mpmd.Concat(), lambda h: h),
    "concat along 1": (mpmd.Concat(1), lambda h: h),
    "last": (Last(), lambda h: h[0]),
    "mean": (RunningMean(), lambda h: jnp.mean(h, 0)),
    "logsumexp": (LogSumExp(), lambda h: h[0]),
    "histogram": (Histogram(), lambda h: jnp.max(h)),
}


@program(
    OPERATIONS,
)
def auxiliary_output_under(entry):
    operation, make = entry

    def loss(params, x, y):
        h = mlp(params, x)
        return jnp.mean((h - y) ** 2), make(h)

    return with_aux(loss, operation)


@program()
def auxiliary_outputs_of_every_stage():
    def loss(params, x, y):
        h, norms = x, []
        for i, stage in enumerate(params):
            h = layer(stage, h)
            norms.append(jnp.linalg.norm(h))
            if i < 2:
                h = mpmd.mark_stage_end(h)
        return jnp.mean((h - y) ** 2), {"norms": norms, "sum": sum(norms), "all": jnp.stack(norms)}

    return with_aux(loss, {"norms": mpmd.Max, "sum": mpmd.Add, "all": mpmd.Concat()})


class Metrics(NamedTuple):
    loss: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Summary:
    metrics: Metrics
    extra: dict
    nothing: None = None


@program()
def metrics_in_dataclasses_and_named_tuples():
    def loss(params, x, y):
        h = mlp(params, x)
        value = jnp.mean((h - y) ** 2)
        correct = jnp.sum(jnp.argmax(h, -1) == jnp.argmax(y, -1))
        return value, Summary(Metrics(value, correct), {"empty": (), "none": None})

    return with_aux(loss, mpmd.Add)
