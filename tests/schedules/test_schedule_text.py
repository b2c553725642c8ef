"""Lists of tasks read back from all that prints them, and a schedule that is made of such lists."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpmd
from mpmd.ir.plan import FusedTask, Task
from mpmd.render import schedule_grid
from mpmd.schedules import (
    FAMILIES,
    CustomSchedule,
    ForwardOnly,
    GPipe,
    Interleaved1F1B,
    ScheduleError,
    Std1F1B,
    build,
    check_schedule,
    from_text,
    to_text,
)

kinds = st.sampled_from(["fwd", "bwd", "bwdA", "bwdW"])
tasks = st.builds(Task, kinds, st.integers(0, 99), st.integers(0, 999))
fused_tasks = st.builds(FusedTask, st.lists(tasks, min_size=2, max_size=4).map(tuple))
lists = st.lists(st.lists(tasks | fused_tasks, max_size=6), min_size=1, max_size=5)
schedules = [
    *(build(name, 3) for name in FAMILIES),
    Interleaved1F1B(6, 2),
    Std1F1B(1),
    ForwardOnly(2, 2, placement=(1, 0)),
]


@given(lists, st.sampled_from(["tasks", "csv"]))
def test_what_is_written_reads_back(written, form):
    assert from_text(to_text(written, form)) == written


@given(st.sampled_from(schedules), st.sampled_from([1, 3, 12]))
def test_the_printed_grid_reads_back(schedule, num_microbatches):
    written = schedule.tasks(num_microbatches)
    assert from_text(schedule_grid(written)) == written
    assert from_text(to_text(written, "csv")) == written


def test_tasks_as_text():
    assert to_text(Interleaved1F1B(2, 2).tasks(1)) == (
        "fwd_0__0 | bwd_0__0\n"
        "FusedTask(fwd_1__0, bwd_1__0)"
    )  # fmt: skip
    assert to_text([[Task("fwd", 0, 0)], []]) == "fwd_0__0\n."


def test_what_separates_cells_does_not_matter():
    expected = [[Task("fwd", 0, 0), FusedTask((Task("fwd", 0, 1), Task("bwd", 0, 0))), Task("bwd", 0, 1)], []]
    for text in [
        "fwd_0__0 FusedTask(fwd_0__1, bwd_0__0) bwd_0__1\n.",
        "\n  fwd_0__0 | FusedTask(fwd_0__1,bwd_0__0), bwd_0__1\n\n  .\n\n",
        "0 F0 F1+B0--- B1---\n1 . . .",
        "0F0,,(0F1;0B0)OVERLAP_F_B,0B1\r\n,,\r\n",
        'F0 F1 +B0---- | fwd_0__1 | 0B1\n""'.replace(" | fwd_0__1", ""),
    ]:
        assert from_text(text) == expected, text


PYTORCH = """
0F0,0F1,,,0I0,0I1,0W0,0W1
,1F0,1B0,(1F1;1I1)OVERLAP_F_B,1W1
"""


def test_the_csv_form_of_pytorch():
    read = from_text(PYTORCH)
    assert read == from_text(
        "fwd_0__0 fwd_0__1 bwdA_0__0 bwdA_0__1 bwdW_0__0 bwdW_0__1\n"
        "fwd_1__0 bwd_1__0 FusedTask(fwd_1__1, bwdA_1__1) bwdW_1__1"
    )
    check_schedule(read, num_stages=2, num_microbatches=2)
    assert to_text(read, "csv") == "0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1B0,(1F1;1I1)OVERLAP_F_B,1W1"
    assert to_text([[], [Task("fwd", 1, 0)]], "csv") == '""\n1F0'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fwd_0__0 fwd_0_1", "line 1, column 10: 'fwd_0_1' is not a task; write e.g. 'fwd_2__1'"),
        ("F0\n\n  B0 X1", "line 3, column 6: 'X1' is not a task"),
        ("F0x B0", "line 1, column 1: 'F0x' is not a task"),
        ("F0+ | B0", "line 1, column 1: 'F0+' is not a task"),
        ("0F0,0SEND_F0", "line 1, column 5: '0SEND_F0' is a communication, which follows from the tasks"),
        ("1UNSHARD", "'1UNSHARD' is a communication"),
        ("(0F0)OVERLAP_F_B", "fuses nothing"),
        ("(0F0;0B)OVERLAP_F_B", "'0B' is not a task; write e.g. '2F1'"),
        ("(0F0;0B0)", r"'(0F0;0B0)' is not a task"),
        ("FusedTask(fwd_0__0, bwd_0__0", "column 1: 'FusedTask(fwd_0__0' is not a task"),
        ("0 F0\n2 F0", "line 2, column 1: the row of group 1 is called 2; write the groups in order"),
        ("0 F0 1", "line 1, column 6: '1' is not a task"),
        ("\n \n", "there are no tasks"),
    ],
)
def test_other_text_is_an_error_that_says_where(text, said):
    with pytest.raises(ValueError) as caught:
        from_text(text)
    assert said in str(caught.value)


def test_all_that_cannot_be_read_is_named_at_once():
    with pytest.raises(ValueError) as caught:
        from_text("F0 ?\n! B0")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "line 1, column 4",
        "line 2, column 1",
    ]


GRID = """
0  F0 F1 .  B0--- B1---
1  .  F0 B0--- F1 B1---
"""


def test_a_schedule_of_text():
    schedule = mpmd.CustomSchedule.from_text(GRID)
    assert repr(schedule) == "CustomSchedule(num_stages=2, mpmd_dim=2, num_microbatches=2)"
    assert schedule.tasks(2) == from_text(GRID)
    assert schedule == CustomSchedule(from_text(GRID)) and hash(schedule) == hash(
        CustomSchedule(from_text(GRID))
    )
    assert schedule != CustomSchedule(GPipe(2).tasks(2))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.lists = ()


def test_a_schedule_of_a_file(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(to_text(Std1F1B(3).tasks(5), "csv"))
    assert CustomSchedule.from_file(path).tasks(5) == Std1F1B(3).tasks(5)
    assert CustomSchedule.from_file(str(path)) == CustomSchedule(Std1F1B(3).tasks(5))


def test_another_number_of_microbatches_is_an_error():
    with pytest.raises(ValueError, match="has the tasks of 2 microbatches, got num_microbatches=3; use as"):
        CustomSchedule.from_text(GRID).tasks(3)


@pytest.mark.parametrize("text", ["B0 F0", "F0 B0 F2 B2", "F0 B0\nF1 B1", "."])
def test_lists_that_cannot_run_are_refused(text):
    with pytest.raises(ScheduleError, match="the schedule cannot run"):
        CustomSchedule.from_text(text)


def test_the_size_of_a_schedule_of_lists_is_theirs():
    with pytest.raises(ValueError, match="CustomSchedule has the size of its lists"):
        CustomSchedule.of_size(2, 2)


def test_no_groups_are_refused():
    with pytest.raises(ValueError, match="mpmd_dim must be a whole number of at least 1, not 0"):
        CustomSchedule([])
