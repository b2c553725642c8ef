"""Random programs whose layers are a scan compute what plain JAX computes."""

import pytest
from hypothesis import given

from tests.support.effort import costly
from tests.support.models import batch
from tests.support.parity import assert_parity, mesh_of
from tests.support.random_programs.scans import scanned_programs, scanned_step, state_of

pytestmark = pytest.mark.usefixtures("quick_compiles")


def check(program):
    assert_parity(
        scanned_step(program),
        state_of(program),
        *batch(2),
        mesh=mesh_of(program.stages),
        tolerance=0.03 if program.half else 1e-4,
        donate_argnums=0 if program.donate else (),
    )


@costly
@given(scanned_programs())
def test_random_scans(program):
    check(program)
