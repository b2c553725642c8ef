"""How the arguments of a step are sharded for a candidate."""

import pytest

from mpmd.planner.candidate import Candidate
from mpmd.planner.trials.shardings import argument_specs
from mpmd.planner.trials.step_arguments import StepArguments
from mpmd.schedules import Std1F1B


def candidate(fsdp=False, **submesh):
    return Candidate((1,), (submesh,), Std1F1B(1), 1, remat=False, fsdp=fsdp)


BATCH, WEIGHT, MOMENT, BIAS, STACK = range(5)
SMALL = StepArguments(
    shapes=((8, 4), (6, 16), (6, 16), (16,), (8, 3, 4)),
    updated=frozenset({WEIGHT, MOMENT, BIAS, STACK}),
    weights=frozenset({WEIGHT, BIAS, STACK}),
    linked=tuple(map(frozenset, ({BATCH}, {WEIGHT, MOMENT}, {WEIGHT, MOMENT}, {BIAS}, {STACK}))),
    stacked={STACK: 0},  # of eight layers
)
DIVIDED = {"data": {BATCH: 0}, "model": {WEIGHT: 1, BIAS: 0}}


DIVIDED_WEIGHT, COLUMNS, LAST = ("data", "model"), (None, "model"), (None, None, "data")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (candidate(data=2, model=4), [("data",), COLUMNS, COLUMNS, ("model",), ()]),
        (candidate(data=1, model=4), [(), COLUMNS, COLUMNS, ("model",), ()]),
        (candidate(data=3, model=5), [()] * 5),
        (
            candidate(fsdp=True, data=2, model=4),
            [("data",), DIVIDED_WEIGHT, DIVIDED_WEIGHT, ("model",), LAST],
        ),
        (
            candidate(fsdp=True, data=4, model=4),
            [("data",), *[(None, ("model", "data"))] * 2, ("model",), LAST],
        ),
    ],
    ids=["moments like weights", "one device", "no divisor", "FSDP", "FSDP along the same dimension"],
)
def test_specs_of_a_candidate(chosen, expected):
    assert argument_specs(SMALL, DIVIDED, chosen, fixed=[None] * 5) == expected
