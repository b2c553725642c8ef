"""Steps whose schedule is written down as text."""

import pytest

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_parity, mesh_of

GRID = """
0  F0 F1 .  B0--- A1 W1
1  .  F0 B0--- F1+B1---
"""


def test_a_schedule_of_text_trains_with_the_numbers_of_jax():
    schedule = mpmd.CustomSchedule.from_text(GRID)
    assert_parity(make_step(mse, schedule), init(weights(2)), *batch(2), mesh=mesh_of(2))


def test_another_number_of_microbatches_is_an_error():
    step = make_step(mse, mpmd.CustomSchedule.from_text(GRID))
    with (
        mesh_of(2) as mesh,
        pytest.raises(mpmd.CompileError, match="of 2 microbatches, got num_microbatches=3"),
    ):
        mpmd.jit(step, mpmd_mesh=mesh).compile(init(weights(2)), *batch(3))
