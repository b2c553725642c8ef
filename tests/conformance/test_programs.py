"""Every program of the table, on groups of this process's devices, against plain JAX."""

import pytest

from mpmd.compiler.jaxprs.rules import RULES
from tests.support.covering import COVERING, lines_and_costs_of_programs
from tests.support.parity import assert_case_on, mesh_of
from tests.support.primitives import WITHOUT_RULE, primitives_in
from tests.support.programs import PROGRAMS

pytestmark = [
    pytest.mark.usefixtures("quick_compiles"),
    pytest.mark.filterwarnings("error::mpmd.errors.IdleGroupWarning"),  # meshes are of as many as are needed
]


@pytest.mark.usual(*COVERING)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program(program):
    case = program.case()
    with mesh_of(case.groups, **case.axes) as mesh:
        loaded = assert_case_on(mesh, case)
    if case.holds:
        case.holds(loaded)
    unknown = primitives_in(loaded) - RULES.keys() - WITHOUT_RULE.keys()
    assert not unknown, (
        f"{unknown}: give each a rule in jaxprs/rules.py, or say in WITHOUT_RULE why it has none"
    )


@pytest.mark.slow
def test_the_usual_programs_run_every_line_that_any_runs():
    lines, _ = lines_and_costs_of_programs()
    usual = set().union(*(lines[name] for name in COVERING))
    missing = set().union(*lines.values()) - usual
    assert not missing, f"run `python -m tests.support.covering`; not run are {sorted(missing)}"
