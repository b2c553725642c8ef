"""Every program of the table, on groups of this process's devices, against plain JAX."""

import pytest

from mpmd.compiler.jaxprs.rules import RULES
from tests.support.parity import assert_parity, mesh_of
from tests.support.primitives import WITHOUT_RULE, primitives_in
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


@pytest.mark.one_in(3)
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
    unknown = primitives_in(loaded) - RULES.keys() - WITHOUT_RULE.keys()
    assert not unknown, (
        f"{unknown}: give each a rule in jaxprs/rules.py, or say in WITHOUT_RULE why it has none"
    )
