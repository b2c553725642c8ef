"""A group's process holds in memory what the plan says, and nothing else."""

import jax
import numpy as np
import pytest
import ray

import mpmd
from mpmd.schedules.families import build
from tests.support import large_model
from tests.support.models import batch, init, make_step, mse, weights

SECONDS = 60


def record(actor):
    """Has an actor record, after every task and message, what its process holds in memory."""
    from mpmd.runtime import operations

    actor.peak, actor.unexpected = 0, []
    values = {id(value) for value in actor._worker._values.values()}
    actor.constants = [array for array in jax.live_arrays() if id(array) not in values]

    def recording(perform):
        def perform_and_record(operation, state):
            perform(operation, state)
            held = {id(value): value.nbytes for value in state.table if value is not None}
            actor.peak = max(actor.peak, sum(held.values()))
            kept = {id(value) for value in [*actor._worker._values.values(), *actor.constants]}
            actor.unexpected += [
                str(array.aval)
                for array in jax.live_arrays()
                if id(array) not in held and id(array) not in kept and not array.is_deleted()
            ]

        return perform_and_record

    actor.original = {kind: kind.perform for kind in (operations.RunTask, operations.ReceiveMessage)}
    for kind, perform in actor.original.items():
        kind.perform = recording(perform)


def recorded(actor):
    """What was recorded. The actor records no more."""
    for kind, perform in actor.original.items():
        kind.perform = perform
    return actor.peak, actor.unexpected


@pytest.mark.usual("ZeroBubble")
@pytest.mark.parametrize("name", ["Std1F1B", "Interleaved1F1B", "ZeroBubble"])
def test_processes_hold_what_the_plan_says_and_nothing_else(four_groups, name):
    schedule = build(name, 4)
    step = make_step(mse, schedule)
    state, (xs, ys) = init(weights(schedule.num_stages)), batch(6)
    compiled = mpmd.jit(step, mpmd_mesh=four_groups, donate_argnums=0).compile(state, xs, ys)
    actors = four_groups.runtime.actors
    state, _ = jax.block_until_ready(compiled(state, xs, ys))
    ray.get([actor.__ray_call__.remote(record) for actor in actors], timeout=SECONDS)
    state, (loss, _) = jax.block_until_ready(compiled(state, xs, ys))
    assert np.isfinite(float(loss))
    peaks, unexpected = zip(
        *ray.get([a.__ray_call__.remote(recorded) for a in actors], timeout=SECONDS), strict=True
    )
    assert list(peaks) == [group.memory.live_bytes for group in compiled.report().groups]
    assert not any(unexpected)


@pytest.mark.slow
def test_processes_take_the_memory_of_the_report(four_groups):
    """Whether messages wait depends on the timing; the report has the most that may wait."""
    schedule, xs = mpmd.GPipe(4), large_model.inputs()
    state = large_model.initial_state(schedule.num_stages)
    jitted = mpmd.jit(large_model.make_step(schedule), mpmd_mesh=four_groups, donate_argnums=0)
    compiled = jitted.compile(state, xs)
    actors = four_groups.runtime.actors

    def on_all(function, *arguments):
        calls = [actor.__ray_call__.remote(lambda _: function(*arguments)) for actor in actors]
        return ray.get(calls, timeout=SECONDS)

    before = on_all(large_model.status, "VmRSS")
    for _ in range(2):
        on_all(large_model.forget_peak)
        state, _ = jax.block_until_ready(compiled(state, xs))
    peaks = on_all(large_model.status, "VmHWM")
    for group, most, least in zip(compiled.report().groups, peaks, before, strict=True):
        messages = group.memory.peak.messages
        assert 0.9 * (group.process_bytes - messages) < most - least < 1.1 * group.process_bytes
