"""The memory of a simulated plan over slices: that of each slice's own length."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from mpmd.ir.plan import Task
from mpmd.simulate import simulate
from tests.support.parity import mesh_of

LENGTH, WIDTH = 16, 4


def lowered_step(bounds):
    """A step over slices of a recurrence on the last token, with what is kept for each token."""

    def loss(params, x):
        carried, total = [jnp.zeros((1, 1, WIDTH))] * 2, 0.0
        for h in mpmd.slices(x, bounds):
            for i, weight in enumerate(params):
                h = jnp.tanh(h @ weight + carried[i])
                carried[i] = h[:, -1:]
                if i == 0:
                    h = mpmd.mark_stage_end(h)
            total += jnp.sum(h**2)
        return total

    def step(params, xs):
        return mpmd.treduce(
            lambda x: jax.grad(loss)(params, x),
            xs,
            mpmd.Seq1F1B(2, len(bounds) - 1),
            operation=mpmd.Add,
        )

    params = [jnp.eye(WIDTH)] * 2
    with mesh_of(2) as mesh:
        return mpmd.jit(step, mesh).lower(params, np.ones((3, 1, LENGTH, WIDTH), np.float32))


def test_a_slice_holds_the_bytes_of_its_length():
    bounds = (0, 12, 16)
    lowered = lowered_step(bounds)
    simulation = simulate(lowered.plan)
    first, second = (
        growth(simulation, Task("fwd", lowered.plan.loops[0].numbers.number(0, k), 0)) for k in (0, 1)
    )
    lengths = np.diff(bounds)
    assert first > 0 and first / second == lengths[0] / lengths[1]
    values = [group.memory.live_bytes for group in lowered.report().groups]
    assert all(held >= value for held, value in zip(simulation.peaks, values, strict=True))


def growth(simulation, task):
    """The bytes that are held for later tasks of what a task of the first group makes."""
    work = simulation.workload
    operation = next(i for i in work.operations(0) if work.tasks[i] == task)
    return work.at_start[operation]
