"""A part of the table of programs, on Ray actors, with the state donated."""

import pytest

from tests.support.parity import assert_parity_on
from tests.support.programs import PROGRAMS


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.on_ray], ids=lambda program: program.name)
def test_program(program, request):
    case = program.case()
    mesh = request.getfixturevalue("two_groups" if case.axes else "four_groups")
    assert_parity_on(
        mesh,
        case.step,
        case.state,
        *case.batch,
        tolerance=case.tolerance,
        **{"donate_argnums": 0, **case.options},
    )
