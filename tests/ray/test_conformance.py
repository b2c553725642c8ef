"""A part of the table of programs, on Ray actors, with the state donated."""

import pytest

from tests.support.covering import COVERING
from tests.support.parity import assert_case_on
from tests.support.programs import PROGRAMS

CROSSING = (
    "an_infinite_loss_scale",
    "auxiliary_output_under[concat along 1]",
    "in_order[zero bubble]",
    "numbers_of_python_that_are_returned",
    "data_parallel_transformer[FSDP]",
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
    for mesh in ["two_groups", "two_process_groups"] if case.axes else ["four_groups"]:
        assert_case_on(request.getfixturevalue(mesh), case, donate_argnums=0)
