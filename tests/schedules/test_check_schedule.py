"""Lists of tasks that cannot run: every fault is named, and its cells are marked in a grid of the lists."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

from mpmd.ir.plan import FusedTask, Task
from mpmd.schedules import (
    Eager1F1B,
    ScheduleError,
    Std1F1B,
    check_schedule,
    from_text,
    total_order,
)


def error_of(tasks: Any, num_stages: int = 2, num_microbatches: int = 1, mpmd_dim: int | None = None):
    """The error of lists of tasks, or of a text of two groups."""
    if isinstance(tasks, str):
        tasks, mpmd_dim = from_text(tasks), mpmd_dim or 2
    with pytest.raises(ScheduleError) as caught:
        check_schedule(tasks, num_stages, num_microbatches, mpmd_dim)
    return caught.value


FAULTS = {
    "missing": (
        "fwd_0__0\nfwd_1__0 bwd_1__0",
        ["missing: bwd_0__0"],
    ),
    "half of a split backward": (
        "fwd_0__0 bwdW_0__0\nfwd_1__0 bwdA_1__0",
        ["missing: bwdA_0__0, bwdW_1__0"],
    ),
    "whole and split": (
        "fwd_0__0 bwdA_0__0 bwdW_0__0 bwd_0__0\nfwd_1__0 bwd_1__0",
        ["there next to a bwdA or bwdW of the same stage and microbatch: bwd_0__0 (group 0)"],
    ),
    "whole and half": (
        "fwd_0__0 bwdA_0__0 bwd_0__0\nfwd_1__0 bwd_1__0",
        [
            "missing: bwdW_0__0",
            "there next to a bwdA or bwdW of the same stage and microbatch: bwd_0__0 (group 0)",
        ],
    ),
    "a forward in lists without backwards": (
        "F0\n.",
        ["missing: fwd_1__0"],
    ),
    "repeated": (
        "fwd_0__0 bwd_0__0 bwd_0__0\nFusedTask(fwd_1__0, bwd_1__0)",
        ["more than once: bwd_0__0 (group 0), bwd_0__0 (group 0)"],
    ),
    "not of this step": (
        "fwd_0__0 bwd_0__0 fwd_2__0\nfwd_1__0 bwd_1__0 fwd_1__1",
        ["not of this step: fwd_2__0 (group 0), fwd_1__1 (group 1)"],
    ),
    "a stage on two groups": (
        "fwd_0__0 bwd_1__0 bwd_0__0\nfwd_1__0",
        ["stage 1 is on more than one group: bwd_1__0 (group 0), fwd_1__0 (group 1)"],
    ),
    "too early": (
        "fwd_0__0 bwd_0__0\nbwd_1__0 fwd_1__0",
        ["group 1 runs bwd_1__0 before fwd_1__0, which it needs"],
    ),
    "too early within a fused task": (
        "fwd_0__0 FusedTask(bwdW_0__0, bwdA_0__0)\nfwd_1__0 bwd_1__0",
        ["group 0 runs bwdW_0__0 before bwdA_0__0, which it needs"],
    ),
    "a fused task that waits for what needs its own result": (
        "FusedTask(fwd_0__0, bwd_0__0)\nfwd_1__0 bwd_1__0",
        [
            "deadlock: group 0 waits at FusedTask(fwd_0__0, bwd_0__0) for bwd_1__0 (group 1); "
            "group 1 waits at fwd_1__0 for fwd_0__0 (group 0)"
        ],
    ),
    "groups": (
        "fwd_0__0 fwd_1__0 bwd_1__0 bwd_0__0",
        ["lists for 1 groups, where mpmd_dim is 2"],
    ),
    "several": (
        "bwd_0__0 fwd_0__0\nfwd_1__0 fwd_1__1",
        [
            "not of this step: fwd_1__1 (group 1)",
            "missing: bwd_1__0",
            "group 0 runs bwd_0__0 before fwd_0__0, which it needs",
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_faults_are_found(fault):
    text, expected = FAULTS[fault]
    error = error_of(text)
    assert [found.message for found in error.faults] == expected
    lines = str(error).splitlines()
    assert lines[0] == "the schedule cannot run (2 stages, 1 microbatch):"
    assert lines[1 : len(expected) + 1] == [f"  [{i}] {said}" for i, said in enumerate(expected, start=1)]


PICTURES = {
    "one stage per group": (
        "F0 B0 B0\nB0 F0 F3",
        """
    0  F0     B0[2]  B0[2]
    1  B0[3]  F0[3]  F3[1]
""",
    ),
    "several stages per group": (
        "0F0 1B0 0B0 \n 1F0",
        """
    0  0F0     1B0[1]  0B0
    1  1F0[1]
""",
    ),
    "a deadlock": (
        "F0+B0\nF0 B0",
        """
    0  F0+B0[1]
    1  F0[1]     B0[1]
""",
    ),
    "two faults of one cell": (
        "0F0 1B0 1F0 1B0 0B0\n.",
        """
    0  0F0        1B0[1][2]  1F0[2]     1B0[1]     0B0
    1
""",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_cells_of_a_fault_are_marked(name):
    text, picture = PICTURES[name]
    assert str(error_of(text)).split("\n\n")[1] == picture.strip("\n")


def test_a_fault_without_cells_needs_no_picture():
    assert str(error_of("F0\nF0 B0")) == (
        "the schedule cannot run (2 stages, 1 microbatch):\n  [1] missing: bwd_0__0"
    )


def test_of_a_large_schedule_only_the_neighbourhood_of_the_faults_is_shown():
    tasks = Std1F1B(32).tasks(128)
    tasks[7][3] = tasks[7][9]
    del tasks[20][30]
    assert str(error_of(tasks, 32, 128)) == (
        "the schedule cannot run (32 stages, 128 microbatches):\n"
        "  [1] missing: fwd_7__3, bwd_20__9\n"
        "  [2] more than once: fwd_7__9 (group 7), fwd_7__9 (group 7)\n"
        "\n"
        "     7  (1)    F1     F2     F9[2]  F4     F5     (1)    "
        "F7     F8     F9[2]  F10    F11    (244)\n"
        "    and 31 more groups, none of them with marks"
    )


def test_however_wrong_a_schedule_is_the_message_can_be_read():
    tasks = [cells[::-1] for cells in Std1F1B(64).tasks(64)]
    error = error_of(tasks, 64, 64)
    assert len(error.faults) > 64 * 64
    assert f"\n  and {len(error.faults) - 20} more\n" in str(error)
    assert len(str(error).splitlines()) < 40 and max(map(len, str(error).splitlines())) < 200
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_groups_that_wait_for_each_other_are_named_and_marked():
    tasks = from_text("F0 B0 F1 B1\nF0 F1 B0 B1\nF0 F1 B0 B1\n")
    # Group 2 is stuck too, but waits only for those that wait for each other.
    assert str(error_of(tasks, 3, 2)).splitlines()[1:] == [
        "  [1] deadlock: group 0 waits at bwd_0__0 for bwd_1__0 (group 1); "
        "group 1 waits at fwd_1__1 for fwd_0__1 (group 0)",
        "",
        "    0  F0     B0[1]  F1[1]  B1",
        "    1  F0     F1[1]  B0[1]  B1",
        "    2  F0     F1     B0     B1",
    ]
    with pytest.raises(ScheduleError, match="the groups get stuck"):
        total_order(tasks)


def test_what_is_no_cell_is_named_and_marked() -> None:
    tasks = [["fwd_0__0", None, FusedTask(()), *from_text("F0 B0")[0]]]
    assert str(error_of(tasks, num_stages=1)).splitlines()[1:] == [
        "  [1] group 0 has 'fwd_0__0' at position 0: neither a Task nor a FusedTask; leave idle cells out",
        "  [2] group 0 has None at position 1: neither a Task nor a FusedTask; leave idle cells out",
        "  [3] group 0 has an empty FusedTask at position 2",
        "",
        "    0  'fwd_0__0'[1]        None[2]              FusedTask(tasks=[3]  F0                   B0",
    ]


@pytest.mark.slow
def test_a_large_schedule_is_checked_and_ordered_quickly():
    tasks = Eager1F1B(32).tasks(256)
    start = time.process_time()
    check_schedule(tasks, 32, 256, 32)
    checked = time.process_time()
    assert len(total_order(tasks)) == 16_384
    # Far more than it takes, so that a busy machine does not matter; less than a quadratic check would.
    assert checked - start < 5 and time.process_time() - checked < 5


@pytest.mark.slow
def test_groups_that_run_one_after_another_are_ordered_quickly():
    tasks = [[Task(kind, stage, mb) for mb in range(256) for kind in ("fwd", "bwd")] for stage in range(32)]
    start = time.process_time()
    assert len(total_order(tasks)) == 16_384
    assert time.process_time() - start < 5


def test_a_wrong_number_that_makes_the_step_huge_is_found_at_once():
    huge = Task("fwd", 10**12, 10**9)
    with pytest.raises(ValueError, match=r"missing: fwd_0__1, fwd_0__2, .*, … \d{20,} in all"):
        check_schedule([[Task("fwd", 0, 0), huge]], num_stages=10**12 + 1, num_microbatches=10**9 + 1)
