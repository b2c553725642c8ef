"""Specs fit on the groups that run an executable, and groups that share one are alike."""

import dataclasses

import pytest

import mpmd
from mpmd.verify import verify
from tests.support.plans import pipeline_plan

PLAN = pipeline_plan(mpmd.GPipe(2), 1)
"""Two groups that run the same executables, each for its stage."""


def on(*submeshes):
    return dataclasses.replace(PLAN, submeshes=submeshes)


def test_equal_groups():
    plan = on((("data", 2),), (("data", 2),))
    verify(plan)
    assert "submeshes:" not in str(plan)


@pytest.mark.parametrize(
    ("submeshes", "said"),
    [
        (
            ((("data", 2),), (("data", 4),)),
            "fwd is for groups 0 and 1, whose submeshes are not equal",
        ),
        (((("data", 2),),), "there are 1 submeshes for 2 groups"),
    ],
)
def test_what_does_not_fit(submeshes, said):
    with pytest.raises(mpmd.PlanError, match=said):
        verify(on(*submeshes))


def test_a_dimension_that_does_not_divide():
    plan = on((("data", 3),), (("data", 3),))
    forward = dataclasses.replace(plan.executable("fwd"), in_specs=((), ("data",)))
    others = (executable for executable in plan.executables if executable.name != "fwd")
    said = r"fwd on group 0 takes or makes float32\[2,4\] sharded \('data',\), but dimension 0"
    with pytest.raises(mpmd.PlanError, match=said):
        verify(dataclasses.replace(plan, executables=(forward, *others)))


def test_a_program_of_a_group_that_does_not_exist():
    plan = on(*[(("data", 1),)] * 2)
    first, second = plan.programs
    stray = dataclasses.replace(plan, programs=(first, dataclasses.replace(second, mpmd_idx=7)))
    with pytest.raises(mpmd.PlanError, match="the program at 1 is that of group 7"):
        verify(stray)


def test_unequal_submeshes_are_part_of_the_text():
    text = str(on((("data", 2), ("model", 1)), (("data", 4), ("model", 1))))
    assert "submeshes:\n  group 0: data 2 model 1\n  group 1: data 4 model 1\nexecutables:" in text
