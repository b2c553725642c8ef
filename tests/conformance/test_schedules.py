"""Every schedule, with every number of stages, groups and microbatches, gives the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.ir.plan import Run
from tests.support.models import batch, init, layer, make_step, mse, weights
from tests.support.parity import assert_parity, mesh_of

SCHEDULES = {
    "GPipe": lambda stages, groups: mpmd.GPipe(stages),
    "Std1F1B": lambda stages, groups: mpmd.Std1F1B(stages),
    "Eager1F1B": lambda stages, groups: mpmd.Eager1F1B(stages),
    "Interleaved1F1B": mpmd.Interleaved1F1B,
}
ONE_TO_ONE = ["GPipe", "Std1F1B", "Eager1F1B"]
SIZES = [
    *((name, stages, groups) for name in ONE_TO_ONE for stages, groups in [(4, 4), (3, 4), (1, 1)]),
    *(("Interleaved1F1B", stages, groups) for stages, groups in [(4, 4), (8, 4), (3, 3), (1, 1)]),
]


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.usual("1-Std1F1B-3-4", "5-Std1F1B-1-1", "5-Interleaved1F1B-3-3")
@pytest.mark.parametrize(("name", "stages", "groups"), SIZES)
@pytest.mark.parametrize("microbatches", [1, 5, pytest.param(2, marks=pytest.mark.slow)])
def test_sizes(name, stages, groups, microbatches):
    step = make_step(mse, SCHEDULES[name](stages, groups))
    assert_parity(step, init(weights(stages)), *batch(microbatches), mesh=mesh_of(groups), steps=1)


def gradients(schedule, runs=1):
    """The bytes of the loss and gradients of each run of a step under the schedule, of the same arguments."""
    state = init(weights(schedule.num_stages))
    with mesh_of(schedule.mpmd_dim) as mesh:
        step = mpmd.jit(make_step(mse, schedule), mpmd_mesh=mesh)
        results = [step(state, *batch(5))[1] for _ in range(runs)]
        return [[np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result)] for result in results]


def test_gradients_are_equal_bit_by_bit_under_schedules_that_run_the_same_executables():
    """Also from run to run."""
    (expected,) = gradients(mpmd.GPipe(4))
    assert gradients(mpmd.Eager1F1B(4), runs=2) == [expected] * 2
    assert gradients(mpmd.Interleaved1F1B(4, 2)) == [expected]
    (split,) = gradients(mpmd.ZeroBubble(2))
    assert gradients(mpmd.ZeroBubbleH2(2)) == [split]


def peak_of_the_second_group(schedule, microbatches):
    """Bytes; the group holds no part of the batch, whose size grows with the number of microbatches."""
    step = mpmd.jit(make_step(mse, schedule), mpmd.AbstractMpmdMesh({"stage": 4}, "stage"))
    return step.lower(init(weights(4)), *batch(microbatches)).report().groups[1].memory.live_bytes


def test_memory_grows_with_microbatches_where_the_schedule_says_so():
    few = {name: peak_of_the_second_group(SCHEDULES[name](4, 4), 7) for name in ONE_TO_ONE}
    many = {name: peak_of_the_second_group(SCHEDULES[name](4, 4), 9) for name in ONE_TO_ONE}
    assert few["Std1F1B"] == many["Std1F1B"] <= few["Eager1F1B"] == many["Eager1F1B"] < few["GPipe"]
    assert few["GPipe"] < many["GPipe"]


def test_a_checkpointed_stage_keeps_what_it_got_and_no_more():
    def deep(params, h):
        for _ in range(3):
            h = layer(params, h)
        return h

    def made_by_the_middle_stage(stage):
        def loss(params, x, y):
            h = mpmd.mark_stage_end(stage(params[0], x))
            h = mpmd.mark_stage_end(stage(params[1], h))
            return jnp.mean((stage(params[2], h) - y) ** 2)

        step = mpmd.jit(make_step(loss, mpmd.Std1F1B(3)), mpmd.AbstractMpmdMesh({"stage": 3}, "stage"))
        instructions = step.lower(init(weights(3)), *batch()).plan.programs[1].instructions
        (run,) = (i for i in instructions if isinstance(i, Run) and i.label == "fwd_1__0")
        return len(run.outputs)

    assert made_by_the_middle_stage(deep) == 3  # the output of each layer
    assert made_by_the_middle_stage(jax.checkpoint(deep)) == 1  # what it sends
