"""Every family of schedules trains with the numbers of plain JAX, and with the same bits as its like."""

import jax
import numpy as np
import pytest

import mpmd
from mpmd.schedules.families import FAMILIES, build
from tests.support.models import batch, init, make_step, mse, planned, sgd_step, weights
from tests.support.parity import assert_parity, mesh_of

TRAINING = [name for name in FAMILIES if name != "ForwardOnly"]


@pytest.mark.usual("ZeroBubbleH2-2-5", "KimiK2-2-5", "DualPipeV-2-5")
@pytest.mark.parametrize(("groups", "microbatches"), [(2, 5), (3, 2)])
@pytest.mark.parametrize("name", TRAINING)
def test_training(name, groups, microbatches):
    schedule = build(name, groups)
    state = init(weights(schedule.num_stages))
    loaded = assert_parity(make_step(mse, schedule), state, *batch(microbatches), mesh=mesh_of(groups))
    parameters = [leaf for leaf in loaded.plan.inputs if leaf.path.startswith("args[0][0]")]
    assert all(len(leaf.mpmd_idxs) == 1 for leaf in parameters)


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


TEXT = """
0  F0 F1 .  B0--- A1 W1
1  .  F0 B0--- F1+B1---
"""


def test_a_schedule_that_is_written_down_as_text():
    step = make_step(mse, mpmd.CustomSchedule.from_text(TEXT))
    loaded = assert_parity(step, init(weights(2)), *batch(2), mesh=mesh_of(2))
    assert any("+bwd" in executable.name for executable in loaded.plan.executables)
    with pytest.raises(mpmd.CompileError, match="of 2 microbatches, got num_microbatches=3"):
        planned(step, init(weights(2)), *batch(3))


def test_forward_only_refuses_gradients():
    said = r"runs forwards only, but the loop at .* takes gradients"
    with pytest.raises(mpmd.CompileError, match=said):
        planned(sgd_step(mse, mpmd.ForwardOnly(3, 3)), weights(3), *batch(5), groups=3)
