"""What belongs together among a step's arguments, and how they are sharded for a candidate."""

import jax
import pytest

from mpmd.planner.candidate import Candidate
from mpmd.planner.profiling import profile_step
from mpmd.planner.trials.shardings import argument_specs
from mpmd.planner.trials.step_arguments import StepArguments, step_arguments
from mpmd.schedules import Std1F1B
from tests.support.planned_steps import arguments, open_scanned_step


@pytest.fixture(scope="module")
def scanned():
    args = arguments(open_scanned_step)
    leaves = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    return leaves, step_arguments(profile_step(open_scanned_step, args, {}).graph.step)


def test_weights_are_linked_with_what_the_optimizer_keeps(scanned):
    paths, found = scanned
    weights = {path for i, path in enumerate(paths) if i in found.weights}
    assert weights == {"[0]['bias']", "[0]['down']", "[0]['up']"}
    linked = {paths[i] for i in found.linked[paths.index("[0]['up']")]}
    assert linked == {"[0]['up']", "[1][0].mu['up']", "[1][0].nu['up']"}
    assert {paths[i] for i in found.updated} == {path for path in paths if path[:3] in ("[0]", "[1]")}
    assert {found.stacked[i] for i in found.weights} == {0}


def candidate(fsdp=False, **submesh):
    return Candidate((1,), (submesh,), Std1F1B(1), 1, remat=False, fsdp=fsdp)


BATCH, WEIGHT, MOMENT, BIAS = 0, 1, 2, 3
SMALL = StepArguments(
    shapes=((8, 4), (6, 16), (6, 16), (16,)),
    updated=frozenset({WEIGHT, MOMENT, BIAS}),
    weights=frozenset({WEIGHT, BIAS}),
    linked=tuple(map(frozenset, ({BATCH}, {WEIGHT, MOMENT}, {WEIGHT, MOMENT}, {BIAS}))),
    stacked={},
)
DIVIDED = {"data": {BATCH: 0}, "model": {WEIGHT: 1, BIAS: 0}}


def specs(chosen, given=(None,) * 4, known=SMALL):
    return argument_specs(known, DIVIDED, chosen, given)


DIVIDED_WEIGHT, COLUMNS = ("data", "model"), (None, "model")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (candidate(data=2, model=4), [("data",), COLUMNS, COLUMNS, ("model",)]),
        (candidate(data=1, model=4), [(), COLUMNS, COLUMNS, ("model",)]),
        (candidate(data=3, model=5), [(), (), (), ()]),
        (candidate(fsdp=True, data=2, model=4), [("data",), DIVIDED_WEIGHT, DIVIDED_WEIGHT, ("model",)]),
        (candidate(fsdp=True, data=4, model=4), [("data",), *[(None, ("model", "data"))] * 2, ("model",)]),
    ],
    ids=["moments like weights", "one device", "no divisor", "FSDP", "FSDP along the same dimension"],
)
def test_specs_of_a_candidate(chosen, expected):
    assert specs(chosen) == expected


def test_what_the_user_gives_holds_for_all_that_is_linked():
    given = ((), ("model",), None, None)
    assert specs(candidate(data=2, model=2), given) == [(), ("model",), ("model",), ("model",)]
