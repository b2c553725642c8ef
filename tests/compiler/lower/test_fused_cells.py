"""Schedules whose cells run several tasks as one executable."""

import dataclasses

import jax.numpy as jnp

import mpmd
from mpmd.ir.plan import FusedTask, Task
from tests.support.models import batch, layer, mse, sgd_step, weights
from tests.support.parity import assert_parity, mesh_of


@dataclasses.dataclass(frozen=True)
class Together(mpmd.Schedule):
    """Runs the same task of several microbatches at once."""

    parts: tuple[tuple[int, ...], ...]

    def tasks(self, num_microbatches):
        return [
            [
                FusedTask(tuple(Task(kind, stage, i) for i in part))
                for kind, parts in (("fwd", self.parts), ("bwd", self.parts[::-1]))
                for part in parts
            ]
            for stage in range(self.num_stages)
        ]


def test_every_microbatch_of_a_cell_is_accumulated():
    assert_parity(sgd_step(mse, Together(2, 2, ((3, 0), (1, 2)))), weights(2), *batch(4), mesh=mesh_of(2))


@dataclasses.dataclass(frozen=True)
class LateBackwards(mpmd.Schedule):
    """Runs backwards of the last stage together with the forward of the next microbatch."""

    def tasks(self, num_microbatches):
        first = [Task(kind, 0, i) for kind in ("fwd", "bwd") for i in range(num_microbatches)]
        forwards = [Task("fwd", 1, i) for i in range(num_microbatches)]
        backwards = [Task("bwd", 1, i) for i in range(num_microbatches)]
        pairs = zip(forwards[1:], backwards, strict=False)
        return [first, [forwards[0], *map(FusedTask, pairs), backwards[-1]]]


def test_a_cell_may_begin_with_a_forward_that_computes_nothing():
    """Nobody reads the loss, and the backward needs nothing of the forward of the last stage."""

    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        return jnp.sum(h * params[1]["w"][0] * y)

    def step(params, xs, ys):
        params, _ = sgd_step(loss, LateBackwards(2, 2))(params, xs, ys)
        return params, ()

    assert_parity(step, weights(2), *batch(4), mesh=mesh_of(2))
