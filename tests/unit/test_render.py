"""Pictures of schedules and of measured steps."""

from __future__ import annotations

import json
import re
import sys

import pytest

from mpmd.ir import Cell, FusedTask, Task
from mpmd.render import chrome_trace, schedule_grid, timeline_png
from mpmd.schedules import Eager1F1B, GPipe, Interleaved1F1B, Std1F1B
from mpmd.timeline import Event

EVENTS = [
    Event(0, "fwd_0__0", 7.001, 7.002),
    Event(0, "wait for group 1", 7.002, 7.005),
    Event(0, "bwd_0__0", 7.005, 7.007),
    Event(0, "after_0", 7.007, 7.010),
    Event(1, "FusedTask(fwd_1__0, bwd_1__0)", 7.002, 7.005),
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


def test_a_schedule_that_gets_stuck_is_an_error():
    with pytest.raises(ValueError, match="group 0 runs bwd_0__0 before fwd_0__0"):
        schedule_grid([[Task("bwd", 0, 0), Task("fwd", 0, 0)]])


def test_an_empty_schedule_is_empty_text():
    assert schedule_grid([]) == ""


def test_a_trace_has_a_row_per_group_in_microseconds():
    trace = json.loads(json.dumps(chrome_trace(EVENTS)))
    names = [entry for entry in trace["traceEvents"] if entry["name"] == "thread_name"]
    assert [(entry["tid"], entry["args"]["name"]) for entry in names] == [(0, "group 0"), (1, "group 1")]
    slices = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    rows = [(e["tid"], e["name"], e["cat"], round(e["ts"]), round(e["dur"])) for e in slices]
    assert rows == [
        (0, "fwd_0__0", "fwd", 0, 1000),
        (0, "wait for group 1", "other", 1000, 3000),
        (0, "bwd_0__0", "bwd", 4000, 2000),
        (0, "after_0", "other", 6000, 3000),
        (1, "FusedTask(fwd_1__0, bwd_1__0)", "fwd+bwd", 1000, 3000),
    ]
    assert slices[2]["args"] == {"stage": 0, "microbatch": 0}


def test_a_trace_of_nothing_is_empty():
    assert chrome_trace([])["traceEvents"] == []


def test_a_timeline_is_written_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    timeline_png(EVENTS, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_timeline_says_what_it_shows(tmp_path):
    texts = drawn_texts(EVENTS, tmp_path / "step.svg", title="A step")
    assert {"A step", "2 groups, 2 stages, 9 ms, 50% idle", "group 0", "group 1"} <= set(texts)
    assert {"67%", "33%"} <= set(texts)
    assert {"stage 0", "stage 1", "forward", "backward", "outside the loop", "waiting", "idle"} <= set(texts)
    assert "after_0" in texts
    assert "wait for group 1" not in texts


def test_a_timeline_of_split_backwards_names_both_halves(tmp_path):
    events = [Event(0, f"{kind}_0__0", i, i + 1) for i, kind in enumerate(("fwd", "bwdA", "bwdW"))]
    texts = drawn_texts(events, tmp_path / "step.svg")
    assert {
        "backward, input gradient",
        "backward, weight gradient",
        "1 groups, 1 stages, 3 s, 0% idle",
    } <= set(texts)


def test_numbers_that_do_not_fit_are_left_out(tmp_path):
    events = [Event(0, "fwd_0__777", 0.0, 1e-6), Event(0, "bwd_0__888", 1e-6, 1.0)]
    texts = drawn_texts(events, tmp_path / "step.svg")
    assert "888" in texts
    assert "777" not in texts


def drawn_texts(events, path, **options):
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        timeline_png(events, path, **options)
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_a_timeline_of_nothing_is_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no events to draw"):
        timeline_png([], tmp_path / "step.png")


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'mpmd\[plot\]'"):
        timeline_png(EVENTS, tmp_path / "step.png")
