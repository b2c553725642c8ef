"""Specs fit on the groups that run an executable, and groups that share one are alike."""

import pytest

import mpmd
from mpmd.ir.plan import Aval, Executable, GroupProgram, InputLeaf, OutputLeaf, Plan, Run, Task
from mpmd.verify import verify

ROWS = Aval((4, 2), "float32", 4)


def plan_of(submeshes, spec=("data",)):
    """Two groups that run one executable."""
    names = "xy"
    return Plan(
        tuple(
            GroupProgram(i, (Run(Task("fwd", i, 0), "half", (name,), (f"{name}2",)),))
            for i, name in enumerate(names)
        ),
        (Executable("half", (ROWS,), (ROWS,), (), (spec,), (spec,)),),
        tuple(InputLeaf(name, name, ROWS, (i,), spec, False) for i, name in enumerate(names)),
        (),
        tuple(OutputLeaf(name, f"{name}2", ROWS, (i,), spec) for i, name in enumerate(names)),
        submeshes,
    )


@pytest.mark.parametrize("submeshes", [(), ((("data", 2),),) * 2])
def test_equal_groups(submeshes):
    plan = plan_of(submeshes)
    verify(plan)
    assert "submeshes:" not in str(plan)


@pytest.mark.parametrize(
    ("submeshes", "said"),
    [
        (((("data", 2),), (("data", 4),)), "half is for groups 0 and 1, whose submeshes are not equal"),
        (
            ((("data", 3),),) * 2,
            "half on group 0 takes or makes float32[4,2] sharded ('data',), but dimension 0",
        ),
        (((("data", 2),),), "there are 1 submeshes for 2 groups"),
    ],
)
def test_what_does_not_fit(submeshes, said):
    with pytest.raises(mpmd.PlanError) as caught:
        verify(plan_of(submeshes))
    assert said in str(caught.value)


def test_unequal_submeshes_are_part_of_the_text():
    text = str(plan_of(((("data", 2), ("model", 1)), (("data", 4), ("model", 1)))))
    assert "submeshes:\n  group 0: data 2 model 1\n  group 1: data 4 model 1\nexecutables:" in text
