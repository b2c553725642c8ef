"""A part of the table of programs, on Ray actors, with the state donated."""

import pytest

from tests.support.covering import COVERING
from tests.support.parity import assert_case_on
from tests.support.programs import PROGRAMS

CROSSING = (
    "an_infinite_loss_scale",
    "in_order[zero bubble]",
    "numbers_of_python_that_are_returned",
    "fully_sharded_and_gathered_once[fused]",
    "calls_that_feed_one_another[recycling]",
    "auxiliary_output_concatenated_and_reduced[weights]",
)
"""Programs with what crosses processes, or is kept by them."""


@pytest.mark.usual(*CROSSING)
@pytest.mark.parametrize(
    "program",
    [program for program in PROGRAMS if program.name in {*CROSSING, *COVERING}],
    ids=lambda program: program.name,
)
def test_program(program, request):
    """On groups of several devices: of one process, and of a process for each."""
    case = program.case()
    if case.axes and (case.axes != {"fsdp": 2} or case.groups > 2):
        pytest.skip("no mesh that tests share has its shape")
    for mesh in ["two_groups", "two_process_groups"] if case.axes else ["four_groups"]:
        assert_case_on(request.getfixturevalue(mesh), case, donate_argnums=0)
