"""Every program of the table, on groups of this process's devices, against plain JAX."""

import jax
import pytest

from tests.support.parity import assert_parity, mesh_of
from tests.support.programs import PROGRAMS


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """The programs are many and tiny: compiling them takes longer than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def as_parameters(programs):
    """For ``pytest.mark.parametrize``."""
    return [
        pytest.param(program, id=program.name, marks=[] if program.on_ray else [pytest.mark.slow])
        for program in programs
    ]


@pytest.mark.parametrize("program", as_parameters(PROGRAMS))
def test_program(program):
    case = program.case()
    loaded = assert_parity(
        case.step,
        case.state,
        *case.batch,
        mesh=mesh_of(case.groups, **case.axes),
        tolerance=case.tolerance,
        **case.options,
    )
    if case.holds:
        case.holds(loaded)
