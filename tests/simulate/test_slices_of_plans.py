"""The memory of a simulated plan over slices: that of each slice's own length."""

import jax

import mpmd
from mpmd.ir.plan import Task
from mpmd.simulate import simulate
from tests.support.programs.sliced_models import decoder, position_by_position, sliced_loss, token_batch


def test_a_slice_holds_the_bytes_of_its_length(mesh):
    loss = sliced_loss(position_by_position, bounds=(0, 9, 12))

    def step(params, *batch):
        return mpmd.treduce(
            lambda rows: jax.grad(loss)(params, *rows), batch, mpmd.Seq1F1B(2, 2), operation=mpmd.Add
        )

    lowered = mpmd.jit(step, mesh).lower(decoder(), *token_batch())
    simulation = simulate(lowered.plan)
    first, second = (
        growth(simulation, Task("fwd", lowered.plan.loops[0].numbers.number(0, k), 0)) for k in (0, 1)
    )
    assert first > 0 and first == 3 * second
    values = [group.memory.live_bytes for group in lowered.report().groups]
    assert all(held >= value for held, value in zip(simulation.peaks, values, strict=True))


def growth(simulation, task):
    """The bytes that are held for later tasks of what a task of the first group makes."""
    work = simulation.workload
    operation = next(i for i in work.operations(0) if work.tasks[i] == task)
    return work.at_start[operation]
