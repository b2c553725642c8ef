"""What each run of layers costs as a stage, and a number of layers that the user gives."""

import functools
import itertools
import math

import pytest

import mpmd
from mpmd.planner.candidate import Candidate
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.stage_profile import stage_profile
from mpmd.planner.search.stages import CostModel
from mpmd.schedules import Interleaved1F1B, Std1F1B
from tests.support.planned_steps import CLUSTER, arguments, marked_step, open_step, step_without_a_loop
from tests.support.profiles import a100s, gpt

GPT = gpt(8)
TWO = {"data": 2, "sequence": 1, "model": 4}


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate((4, 6), (TWO, TWO), Std1F1B(2), 8, remat=True, fsdp=True),
        Candidate((3, 1, 2, 4), (TWO, {"data": 1, "model": 8}), Interleaved1F1B(4, 2), 16, False, False),
    ],
    ids=["FSDP", "interleaved, uneven"],
)
def test_the_chosen_rows_are_the_stages_of_the_formulas(candidate):
    assert sum(candidate.layers_per_stage) == len(GPT.layers)
    cluster = a100s(nodes=2)
    table = stage_profile(GPT, cluster, candidate)
    expected = evaluate(CostModel(GPT, cluster), candidate).prediction.stage_seconds
    assert [row.forward + row.backward for row in table.chosen] == pytest.approx(expected)
    stops = [*itertools.accumulate(candidate.layers_per_stage)]
    assert [row.layers[1] + 1 for row in table.chosen] == stops
    homes = (0, 1) * (len(stops) // 2)
    for row, home in zip(table.chosen, homes, strict=True):
        assert row.submesh == {"sequence": 1, **candidate.submeshes[home]} and row.mesh == (1, 8)
    assert table.rows_of_microbatch == GPT.rows // candidate.num_microbatches


def test_every_run_of_layers_is_there_on_every_submesh_once():
    candidate = Candidate((len(GPT.layers),), ({"data": 1},), Std1F1B(1), 8, False, False)
    rows = stage_profile(GPT, a100s(nodes=2), candidate).rows
    keys = [(row.layers, *(row.submesh.get(axis, 1) for axis in TWO)) for row in rows]
    count = len(GPT.layers)
    assert len({*keys}) == len(keys) and len(keys) % (count * (count + 1) // 2) == 0
    for row in rows:
        assert math.prod(row.mesh) == math.prod(row.submesh.values())
    (meshes,) = ({row.mesh for row in rows},)
    assert {(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)} == meshes
    whole = {row.layers: row for row in rows if math.prod(row.mesh) == 1}
    parts = whole[0, 1].forward + whole[2, count - 1].forward
    assert whole[0, count - 1].forward == pytest.approx(parts)


@functools.cache
def planned():
    """The choice for two groups, for a step that is divided into two layers."""
    fixes = {"groups": 2, "submesh": {}, "schedule": "Std1F1B", "num_microbatches": 2, "remat": False}
    args = arguments()
    return mpmd.plan(open_step, *args, cluster=CLUSTER, num_layers=2, simulate=1, **fixes)


def test_a_choice_shows_the_table_of_its_loop():
    assert {sum(row.candidate.layers_per_stage) for row in planned().rows} == {2}
    table = planned().stage_profile()
    assert len(table.chosen) == 2
    lines = str(table).splitlines()
    header = ["layers", "mesh", "data", "sequence", "model", "forward", "backward", "chosen"]
    assert lines[2].split() == header and len(lines) == 3 + len(table.rows)
    assert sum(line.endswith(("stage 0", "stage 1")) for line in lines) == 2
    with pytest.raises(ValueError, match="loop must be a whole number from 0 to 0, not 1"):
        planned().stage_profile(1)


@pytest.mark.parametrize(
    ("step", "num_layers", "message"),
    [
        (open_step, 99, "num_layers=99 was asked for; the step has"),
        (marked_step, 2, "the step's marks make 4 stages; num_layers=2 is for one without"),
        (open_step, 0, "num_layers must be a whole number of at least 1, or None, not 0"),
        (step_without_a_loop, 2, "a step without a loop is one layer, and num_layers=2 was asked for"),
    ],
)
def test_numbers_of_layers_that_cannot_be(step, num_layers, message):
    args = arguments(cut=step is marked_step)
    with pytest.raises(ValueError, match=message):
        mpmd.plan(step, *args, cluster=CLUSTER, num_layers=num_layers)
