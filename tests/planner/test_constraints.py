"""What a caller of a plan fixes is checked before anything else."""

from mpmd.planner.constraints import Constraints
from mpmd.schedules import Seq1F1B, Std1F1B


def test_schedules_by_name_class_and_size():
    assert Constraints.of(schedule="std1f1b").schedule == "Std1F1B"
    assert Constraints.of(schedule=Std1F1B).schedule == "Std1F1B"
    assert Constraints.of(schedule=Std1F1B(2)).schedule == Std1F1B(2)
    assert Constraints.of(schedule="seq1f1b").schedule == "Seq1F1B"
    assert Constraints.of(schedule=Seq1F1B(4, 2)).schedule == Seq1F1B(4, 2)


def test_layers_are_a_tuple():
    assert Constraints.of(layers_per_stage=[3, 4]).layers_per_stage == (3, 4)
