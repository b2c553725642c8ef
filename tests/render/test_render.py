"""Schedules as text, and steps as traces and as the data of pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpmd.ir.events import Event, Wait
from mpmd.ir.plan import Cell, FusedTask, Task, parse_task
from mpmd.render import chrome_trace, schedule_grid
from mpmd.render.chart import Chart
from mpmd.schedules import Eager1F1B, GPipe, Interleaved1F1B, Std1F1B, from_text
from mpmd.simulate import Costs, Link, simulate

EVENTS = [
    Event(0, parse_task("fwd_0__0"), 7.001, 7.002),
    Event(0, Wait(1), 7.002, 7.005),
    Event(0, parse_task("bwd_0__0"), 7.005, 7.007),
    Event(0, parse_task("after_0"), 7.007, 7.010),
    Event(1, parse_task("FusedTask(fwd_1__0, bwd_1__0)"), 7.002, 7.005),
]

GRIDS = {
    GPipe(3): """
0  F0 F1 .  .  .  .  .  .  B0--- B1---
1  .  F0 F1 .  .  .  B0--- B1--- .  .
2  .  .  F0 F1 B0--- B1--- .  .  .  .
""",
    Std1F1B(3): """
0  F0 F1 .  .  .  .  .  B0--- .  B1---
1  .  F0 F1 .  .  B0--- .  B1--- .  .
2  .  .  F0 B0--- F1 B1--- .  .  .  .
""",
    Eager1F1B(1): """
0  F0 B0--- F1 B1---
""",
    Interleaved1F1B(4, 2): """
0  0F0 0F1 2F0 2F1 .   .   2B0---- .   2B1---- 0B0---- 0B1----
1  .   1F0 1F1 3F0+3B0---- 3F1+3B1---- 1B0---- 1B1---- .   .
""",
}


@pytest.mark.parametrize("schedule", GRIDS)
def test_a_schedule_as_text(schedule):
    assert schedule_grid(schedule.tasks(2)) == GRIDS[schedule].strip()


def test_split_backwards_and_wide_numbers_as_text() -> None:
    group: list[Cell] = [
        FusedTask((Task("fwd", 0, 9), Task("bwdA", 0, 9))),
        Task("bwdW", 0, 9),
        Task("fwd", 0, 10),
    ]
    assert schedule_grid([group]) == "0  F9 +A9  W9  F10"
    assert from_text(schedule_grid([group])) == [group]


def test_columns_are_as_fine_as_the_times() -> None:
    costs = Costs(link=Link(latency=0.5))
    assert schedule_grid(Std1F1B(2).tasks(1), costs) == (
        "0  F0- . . . . . . . . B0-----\n"
        "1  . . . F0- B0----- . . . . ."
    )  # fmt: skip
    thirds = Costs({"fwd": 1.0, "bwd": 5 / 3})
    assert schedule_grid(Std1F1B(1).tasks(1), thirds) == "0  F0--- B0-------"


def test_times_without_a_common_unit_are_rounded_and_tasks_that_take_no_time_left_out():
    lists = from_text("F0 A0 W0\nF0 A0 W0")
    assert schedule_grid(lists, Costs({"fwd": 1.0, "bwdA": 2.013, "bwdW": 0.0})) == (
        "0  F0 .  .  .  A0---\n"
        "1  .  F0 A0--- .  ."
    )  # fmt: skip


def test_stages_are_named_where_they_are_not_the_groups():
    lists = from_text("1F0 1B0\n0F0 0B0")
    assert schedule_grid(lists) == "0  .   1F0 1B0---- .   .\n1  0F0 .   .   .   0B0----"


def test_an_empty_schedule_is_empty_text():
    assert schedule_grid([]) == ""


def slices(trace):
    return [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]


def test_a_trace_has_a_row_per_group_in_microseconds():
    trace = json.loads(json.dumps(chrome_trace(EVENTS)))
    names = [entry for entry in trace["traceEvents"] if entry["name"] == "thread_name"]
    assert [(entry["tid"], entry["args"]["name"]) for entry in names] == [(0, "group 0"), (1, "group 1")]
    rows = [(e["tid"], e["name"], e["cat"], round(e["ts"]), round(e["dur"])) for e in slices(trace)]
    assert rows == [
        (0, "fwd_0__0", "fwd", 0, 1000),
        (0, "wait for group 1", "other", 1000, 3000),
        (0, "bwd_0__0", "bwd", 4000, 2000),
        (0, "after_0", "other", 6000, 3000),
        (1, "FusedTask(fwd_1__0, bwd_1__0)", "fwd+bwd", 1000, 3000),
    ]
    assert slices(trace)[2]["args"] == {"stage": 0, "microbatch": 0}


def test_a_trace_is_written_where_a_path_says(tmp_path):
    for path in (tmp_path / "step.json", str(tmp_path / "again.json")):
        trace = chrome_trace(EVENTS, path)
        assert json.loads(Path(path).read_text()) == trace == chrome_trace(EVENTS)
    with pytest.raises(FileNotFoundError):
        chrome_trace(EVENTS, tmp_path / "missing" / "step.json")


def test_a_trace_of_nothing_is_empty():
    assert chrome_trace([])["traceEvents"] == []


def test_a_trace_of_a_simulation_says_why_groups_are_idle_and_what_they_hold():
    trace = chrome_trace(simulate(Std1F1B(2).tasks(1)))
    seconds = [(e["tid"], e["name"], e["cat"], e["ts"] / 1e6, e["dur"] / 1e6) for e in slices(trace)]
    assert seconds == [
        (0, "fwd_0__0", "fwd", 0, 1),
        (0, "waits for bwd_1__0 of group 1", "idle", 1, 3),
        (0, "bwd_0__0", "bwd", 4, 2),
        (1, "waits for its first input, fwd_0__0 of group 0", "idle", 0, 1),
        (1, "fwd_1__0", "fwd", 1, 1),
        (1, "bwd_1__0", "bwd", 2, 2),
        (1, "nothing left to do", "idle", 4, 2),
    ]
    counters = [entry for entry in trace["traceEvents"] if entry["ph"] == "C"]
    of_group_1 = [(e["ts"] / 1e6, e["args"]["held"]) for e in counters if e["name"] == "memory of group 1"]
    assert of_group_1 == [(0, 0), (1, 1), (4, 0)]


def test_a_chart_divides_fused_tasks_by_what_their_kinds_take():
    events = [
        Event(0, parse_task("fwd_0__0"), 0.0, 1.0),
        Event(0, parse_task("bwd_0__0"), 1.0, 4.0),
        Event(1, parse_task("FusedTask(fwd_0__1, bwd_0__1)"), 0.0, 2.0),
    ]
    chart = Chart.of(events)
    assert [(str(box.task), box.start, box.end) for box in chart.boxes if box.lane == 1] == [
        ("fwd_0__1", 0.0, 0.5),
        ("bwd_0__1", 0.5, 2.0),
    ]
    assert chart.fused == [(1, 0.0, 2.0)]


def test_a_chart_measures_memory_in_microbatches_of_a_whole_group():
    one, two = simulate(Std1F1B(2).tasks(4)), simulate(Interleaved1F1B(4, 2).tasks(4))
    assert Chart.of(one).peaks == list(one.peaks) == [2, 1]
    assert Chart.of(two).peaks == [peak / 2 for peak in two.peaks] == [2.5, 1.5]
