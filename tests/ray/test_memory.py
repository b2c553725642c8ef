"""A group's process holds in memory what the plan says, and nothing else."""

import jax
import pytest
import ray

import mpmd
from tests.support import large_model

SECONDS = 60


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
