"""The memory of a group's process holds what the plan says, and nothing else."""

import jax
import numpy as np
import pytest
import ray

import mpmd
from mpmd.schedules.families import build
from tests.support.models import batch, init, make_step, mse, weights

SECONDS = 60


def watch(actor):
    """Has an actor look, after every task and message, at what its process has in memory."""
    from mpmd.runtime import operations

    actor.peak, actor.strangers = 0, []
    values = {id(value) for value in actor._worker._values.values()}
    actor.constants = [array for array in jax.live_arrays() if id(array) not in values]

    def watched(perform):
        def watching(operation, step):
            perform(operation, step)
            held = {id(value): value.nbytes for value in step.table if value is not None}
            actor.peak = max(actor.peak, sum(held.values()))
            kept = {id(value) for value in [*actor._worker._values.values(), *actor.constants]}
            actor.strangers += [
                str(array.aval)
                for array in jax.live_arrays()
                if id(array) not in held and id(array) not in kept and not array.is_deleted()
            ]

        return watching

    actor.unwatched = {kind: kind.perform for kind in (operations.RunTask, operations.TakeMessage)}
    for kind, perform in actor.unwatched.items():
        kind.perform = watched(perform)


def seen(actor):
    """What was seen. The actor looks no more."""
    for kind, perform in actor.unwatched.items():
        kind.perform = perform
    return actor.peak, actor.strangers


@pytest.mark.parametrize("name", ["Std1F1B", "Interleaved1F1B", "ZeroBubble"])
def test_processes_hold_what_the_plan_says_and_nothing_else(four_groups, name):
    schedule = build(name, 4)
    step = make_step(mse, schedule)
    state, (xs, ys) = init(weights(schedule.num_stages)), batch(6)
    compiled = mpmd.mpmd_jit_with_loop(step, mpmd_mesh=four_groups, donate_argnums=0).compile(state, xs, ys)
    actors = four_groups.runtime.actors
    state, _ = jax.block_until_ready(compiled(state, xs, ys))
    ray.get([actor.__ray_call__.remote(watch) for actor in actors], timeout=SECONDS)
    state, (loss, _) = jax.block_until_ready(compiled(state, xs, ys))
    assert np.isfinite(float(loss))
    peaks, strangers = zip(
        *ray.get([a.__ray_call__.remote(seen) for a in actors], timeout=SECONDS), strict=True
    )
    assert list(peaks) == [group.peak_bytes for group in compiled.report().groups]
    assert not any(strangers)
