"""Every program of the table, on groups of this process's devices, against plain JAX."""

import pytest

from tests.support.parity import assert_parity, mesh_of
from tests.support.programs import PROGRAMS

pytestmark = [
    pytest.mark.usefixtures("quick_compiles"),
    pytest.mark.filterwarnings("error::mpmd.errors.IdleGroupWarning"),  # meshes are of as many as are needed
]


def as_parameters(programs):
    """For ``pytest.mark.parametrize``."""
    return [
        pytest.param(program, id=program.name, marks=[] if program.usual else [pytest.mark.slow])
        for program in programs
    ]


@pytest.mark.parametrize("program", as_parameters(PROGRAMS))
def test_program(program):
    case = program.case()
    with case.warned():
        loaded = assert_parity(
            case.step,
            case.state,
            *case.batch,
            mesh=mesh_of(case.groups, **case.axes),
            steps=case.steps,
            tolerance=case.tolerance,
            **case.options,
        )
    if case.holds:
        case.holds(loaded)
