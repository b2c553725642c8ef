"""All programs with slices of sequences on Ray actors, with the state donated."""

import inspect

import pytest

from tests.support.parity import assert_case_on
from tests.support.programs import PROGRAMS, sliced_attention, sliced_states, sliced_training

MODULES = {module.__name__ for module in (sliced_attention, sliced_states, sliced_training)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.name)
        for program in PROGRAMS
        if inspect.unwrap(getattr(program.case, "func", program.case)).__module__ in MODULES
    ],
)
def test_program_with_slices(program, request):
    case = program.case()
    mesh = request.getfixturevalue("two_groups" if case.axes else "four_groups")
    assert_case_on(mesh, case, donate_argnums=0)
