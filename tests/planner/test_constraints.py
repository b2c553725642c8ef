"""What a caller of a plan fixes is checked before anything else."""

import pytest

from mpmd.planner.constraints import Constraints
from mpmd.schedules import Seq1F1B, Std1F1B


def test_schedules_by_name_class_and_size():
    assert Constraints.of(schedule="std1f1b").schedule == "Std1F1B"
    assert Constraints.of(schedule=Std1F1B).schedule == "Std1F1B"
    assert Constraints.of(schedule=Std1F1B(2)).schedule == Std1F1B(2)
    assert Constraints.of(schedule="seq1f1b").schedule == "Seq1F1B"
    assert Constraints.of(schedule=Seq1F1B(4, 2)).schedule == Seq1F1B(4, 2)


def test_nothing_is_fixed_by_none():
    assert Constraints.of(groups=None, schedule=None, layers_per_stage=None) == Constraints()


def test_layers_are_a_tuple():
    assert Constraints.of(layers_per_stage=[3, 4]).layers_per_stage == (3, 4)


def test_all_faults_at_once():
    with pytest.raises(TypeError) as error:
        Constraints.of(
            groups=True,
            num_microbatches=0,
            layers_per_stage=(),
            schedule=4,
            submesh={"data": 0},
            remat="yes",
        )
    lines = str(error.value).splitlines()
    names = ("groups", "num_microbatches", "layers_per_stage", "schedule", "submesh", "remat")
    assert [line.split()[0] for line in lines] == list(names)
