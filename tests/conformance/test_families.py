"""Every family of schedules trains with the numbers of plain JAX."""

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
