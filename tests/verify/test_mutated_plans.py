"""Whatever is changed in the plan of a schedule, verify finds it, or it changes nothing that matters."""

import pytest

from mpmd.schedules import CustomSchedule, GPipe, Interleaved1F1B, Std1F1B
from tests.support.mutations import assert_found_or_harmless
from tests.support.plans import pipeline_plan

SPLIT_BACKWARDS = """
0  F0 F1 .  A0 W0 A1 W1
1  .  F0 A0 F1 A1 W0 W1
"""


@pytest.mark.usual("interleaved 1F1B", "split backwards")
@pytest.mark.parametrize(
    "schedule",
    [GPipe(2), Std1F1B(3), Interleaved1F1B(4, 2), CustomSchedule.from_text(SPLIT_BACKWARDS)],
    ids=["GPipe", "1F1B", "interleaved 1F1B", "split backwards"],
)
def test_every_mutation_is_found_or_harmless(schedule):
    found = assert_found_or_harmless(pipeline_plan(schedule, 2))
    assert found[True] > 500 and found[False] < found[True] / 20
