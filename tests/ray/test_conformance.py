"""A part of the table of programs, on Ray actors, with the state donated."""

import pytest

from tests.support.parity import assert_parity_on
from tests.support.programs import PROGRAMS

ON_RAY = [program for program in PROGRAMS if program.on_ray]
SHARDED = [program for program in ON_RAY if program.case().axes]


@pytest.mark.parametrize("program", ON_RAY, ids=lambda program: program.name)
def test_program(program, request):
    case = program.case()
    assert_case(request.getfixturevalue("two_groups" if case.axes else "four_groups"), case)


@pytest.mark.parametrize("program", SHARDED, ids=lambda program: program.name)
def test_program_on_groups_of_two_processes(program, two_process_groups):
    assert_case(two_process_groups, program.case())


def assert_case(mesh, case):
    with case.warned():
        assert_parity_on(
            mesh,
            case.step,
            case.state,
            *case.batch,
            steps=case.steps,
            tolerance=case.tolerance,
            **{"donate_argnums": 0, **case.options},
        )
