"""Steps whose schedule is written down as text."""

import pytest

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_parity, mesh_of

GRID = """
0  F0 F1 .  B0--- A1 W1
1  .  F0 B0--- F1+B1---
"""

CSV = """
0F0,0F1,,,0I0,0I1,0W0,0W1
,1F0,1B0,(1F1;1I1)OVERLAP_F_B,1W1
"""

CELLS = """
fwd_0__0 fwd_0__1 bwdA_0__0 bwdA_0__1 bwdW_0__0 bwdW_0__1
fwd_1__0 bwdA_1__0 fwd_1__1 bwdA_1__1 bwdW_1__0 bwdW_1__1
"""


@pytest.mark.usual("grid")
@pytest.mark.parametrize("text", [GRID, CSV, CELLS], ids=["grid", "csv", "cells"])
def test_a_schedule_of_text_trains_with_the_numbers_of_jax(text):
    schedule = mpmd.CustomSchedule.from_text(text)
    assert_parity(make_step(mse, schedule), init(weights(2)), *batch(2), mesh=mesh_of(2))


def test_another_number_of_microbatches_is_an_error():
    step = make_step(mse, mpmd.CustomSchedule.from_text(GRID))
    with (
        mesh_of(2) as mesh,
        pytest.raises(mpmd.CompileError, match="of 2 microbatches, got num_microbatches=3"),
    ):
        mpmd.jit(step, mpmd_mesh=mesh).compile(init(weights(2)), *batch(3))
