"""Steps of two parts run at the same time, by the recorded times of tasks that sleep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import cluster
import mpmd
from tests.ray.test_parts import BATCH, WEIGHTS
from tests.support.sleeping_tasks import sleep_in_tasks
from tests.support.small_plans import stacked_step

TASK_SECONDS = 0.05
ROUNDS = 6


def begin_to_sleep(actor):
    """Has an actor's tasks sleep, of programs that it loads from now on."""
    sleep_in_tasks(lambda task: TASK_SECONDS)


def sample_step(weights, xs):
    return mpmd.treduce(
        lambda x: x + jnp.tanh(weights.sum(0)).mean(),
        xs,
        schedule=mpmd.ForwardOnly(1, 1),
        operation=mpmd.Concat(),
    )


def submitted(step, *args):
    """The result of a step that is recorded, and the future of its replies. Does not wait."""
    return step.submit(step.signature.bind(args, {}), profile=True)


def span(future):
    """The nanoseconds from the first task of a step to its last, on the clock of the machine."""
    tasks = [task for reply in future.replies() for times in reply.times for task in times.tasks]
    return min(task.start for task in tasks), max(task.end for task in tasks)


@pytest.mark.slow
def test_two_parts_are_at_work_at_once(local_ray):
    """One thread submits: a sampler makes the next batch, while a trainer learns from the one before."""
    parts = {"trainer": {"stage": 2}, "sampler": {"stage": 1}}
    with cluster.launch(parts=parts, cpus_per_group=0.05, timeout=200) as mesh:
        ray.get([actor.__ray_call__.remote(begin_to_sleep) for actor in mesh.runtime.actors])
        train = mpmd.jit(stacked_step(2), mesh.part("trainer")).compile(WEIGHTS, BATCH)
        sample = mpmd.jit(sample_step, mesh.part("sampler")).compile(WEIGHTS, BATCH)
        weights, steps = WEIGHTS, []
        copy, drawn = mpmd.reshard(weights, to=sample), BATCH
        for _ in range(ROUNDS):
            batch = mpmd.reshard(drawn, to=train, argnum=1)
            drawn, sampling = submitted(sample, copy, BATCH)
            (weights, _), training = submitted(train, weights, batch)
            copy = mpmd.reshard(weights, to=sample)
            steps.append((sampling, training))
        jax.block_until_ready((weights, drawn))
        spans = [(span(sampling), span(training)) for sampling, training in steps[1:]]  # the first is slower
    both = [min(a[1], b[1]) - max(a[0], b[0]) for a, b in spans]
    shorter = min(sum(end - start for start, end in of_part) for of_part in zip(*spans, strict=True))
    assert shorter > (ROUNDS - 1) * len(BATCH) * TASK_SECONDS * 1e9, "tasks sleep"
    assert sum(both) > 0.95 * shorter, np.array(spans) / 1e9
