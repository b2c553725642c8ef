"""Schedules give the same numbers, and take the memory that they say."""

import functools

import jax
import numpy as np
import pytest

import mpmd
from tests.support.models import batch, init, layer, make_step, mse, planned, sgd_step, weights
from tests.support.parity import mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")


def gradients(schedule, runs=1):
    """The bytes of the loss and gradients of each run of a step under the schedule, of the same arguments."""
    state = init(weights(schedule.num_stages))
    with mesh_of(schedule.mpmd_dim) as mesh:
        step = mpmd.jit(make_step(mse, schedule), mesh)
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
    lowered = planned(sgd_step(mse, schedule), weights(4), *batch(microbatches), groups=4)
    return lowered.report().groups[1].memory.live_bytes


def test_memory_grows_with_microbatches_where_the_schedule_says_so():
    schedules = mpmd.Std1F1B(4), mpmd.Eager1F1B(4), mpmd.GPipe(4)
    few, many = ([peak_of_the_second_group(schedule, n) for schedule in schedules] for n in (7, 9))
    assert few[0] == many[0] <= few[1] == many[1] < few[2] < many[2]


def test_a_checkpointed_stage_keeps_what_it_got_and_no_more():
    def deep(params, h):
        for _ in range(3):
            h = layer(params, h)
        return h

    def made_by_the_middle_stage(stage):
        step = sgd_step(functools.partial(mse, layer=stage), mpmd.Std1F1B(3))
        plan = planned(step, weights(3), *batch(), groups=3).plan
        (run,) = (run for run in plan.programs[1].runs if run.label == "fwd_1__0")
        return len(run.outputs)

    assert made_by_the_middle_stage(deep) == 3  # the output of each layer
    assert made_by_the_middle_stage(jax.checkpoint(deep)) == 1  # what it sends
