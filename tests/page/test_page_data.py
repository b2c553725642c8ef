"""The data of pages: sums that are exact, numbers that lead to the right tasks, and names that stay text."""

import dataclasses
import itertools
import json
import re

import jax
import numpy as np
import pytest

import mpmd
from mpmd.attribution.gaps import Causes
from mpmd.attribution.texts import time_text
from mpmd.ir.tasks import FusedTask, parse_task
from mpmd.memory import MemoryParts
from mpmd.render.page.changes import changes_data
from mpmd.render.page.document import document
from mpmd.render.page.memory import memory_data
from mpmd.render.page.palette import CAUSES, MEMORY
from mpmd.render.page.profile_data import page_data
from mpmd.render.page.tables import capitalized, percentile
from mpmd.schedules import DualPipeV
from tests.page.conftest import GROUPS, HOSTILE, MICROBATCHES
from tests.support.drawn_profiles import drawn_profile
from tests.support.plans import ACTIVATION, pipeline_plan
from tests.support.recorded_steps import recovered
from tests.support.small_plans import lowered, stacked_step


@pytest.fixture(scope="module")
def data(profile):
    return page_data(profile._subject("Measured"))


def rows_of(data, section, table=0):
    """The rows of a table as dictionaries from titles to cells."""
    tables = next(each for each in data["sections"] if each["id"] == section)["tables"]
    titles = list(tables[table].columns)
    return [dict(zip(titles, row, strict=True)) for row in tables[table].rows]


def columns(group):
    """The start and end of each task of a group, as the page adds them up."""
    time = 0
    for idle, took in zip(group["idle"], group["took"], strict=False):
        yield time + idle, (time := time + idle + took)


def test_times_are_those_of_the_measured_step(profile, data):
    measured = profile.attribution.measured
    for group, of_group in enumerate(data["groups"]):
        spans = [(measured.starts[i], measured.end(i)) for i in measured.tasks(group)]
        assert list(columns(of_group)) == spans
        for took, used in zip(of_group["took"], of_group["processor"], strict=True):
            assert used == int(0.75 * took)
        assert spans[-1][1] + of_group["idle"][-1] == data["makespan"] == measured.returned


def test_causes_add_up_to_each_gap_each_group_and_the_step(data):
    tasks, *causes = data["parts"]
    for group, row in zip(data["groups"], rows_of(data, "idle"), strict=True):
        for k, idle in enumerate(group["idle"]):
            assert sum(cause[k] for cause in group["causes"] if cause) == idle
        sums = [sum(cause) for cause in group["causes"]]
        assert tuple(sums) == row["By cause"]
        assert sum(sums) == row["Idle"] == data["makespan"] - sum(group["took"])
    totals = np.sum([row["By cause"] for row in rows_of(data, "idle")], axis=0)
    assert [cause["total"] for cause in causes] == list(totals)
    assert tasks["total"] + sum(totals) == data["whole"] == GROUPS * data["makespan"]


def test_longest_gaps_are_those_with_the_most_beyond_the_fill(data):
    waits = rows_of(data, "idle", 1)
    beyond = [wait["Beyond fill"] for wait in waits]
    assert beyond == sorted(beyond, reverse=True)
    for wait in waits:
        group, k = wait[""]
        fill, *others = (cause[k] if cause else 0 for cause in data["groups"][group]["causes"])
        assert (sum(others), fill + sum(others)) == (wait["Beyond fill"], wait["Idle"])
        assert wait["Most of that"][0] == data["parts"][2 + others.index(max(others))]["label"]


def test_findings_and_scenarios_are_those_of_the_profile(profile, data):
    assert [finding["saves"] for finding in data["findings"]] == [f.share_saved for f in profile.findings]
    for shown, finding in zip(data["findings"], profile.findings, strict=True):
        assert shown["text"].lower() == f"{finding.text.lower()}."
    first, *notable = rows_of(data, "what")
    folded = rows_of(data, "what", 1)
    assert first["The step takes"] == profile.scenarios[0].makespan
    assert all(row["Saves"] >= 0.005 for row in notable)
    assert all((row["Saves"] or 0) < 0.005 for row in folded)
    names = {scenario.name.lower() for scenario in profile.scenarios[1:]}
    assert {row["If"].lower() for row in [*notable, *folded]} == names


def test_findings_about_tasks_begin_with_the_task_as_it_is_written():
    assert capitalized("bwdW_2 on group 2 took longer") == "bwdW_2 on group 2 took longer"
    assert capitalized("group 2 has more work") == "Group 2 has more work"


def test_all_causes_and_purposes_have_looks():
    assert list(CAUSES) == list(Causes._fields)
    assert list(MEMORY) == [field.name for field in dataclasses.fields(MemoryParts)]


def test_the_critical_path_has_no_hole(profile, data):
    path, parts = data["path"], rows_of(data, "critical")
    assert sum(row["Sum"] for row in parts) == data["makespan"]
    assert parts[0]["Sum"] == sum(end - start for start, end in zip(path["start"], path["end"], strict=True))
    assert path["end"][-1] <= data["makespan"]
    assert all(end <= start for end, start in zip(path["end"], path["start"][1:], strict=False))


def test_numbers_are_those_of_tasks(profile, data):
    """The names that the page writes are those of the plan's tasks, and gaps wait for other groups."""
    measured = profile.attribution.measured
    groups = [g for g, group in enumerate(data["groups"]) for _ in group["took"]]
    for g, group in enumerate(data["groups"]):
        tasks = [measured.workload.tasks[i] for i in measured.tasks(g)]
        for k, task in enumerate(tasks):
            label, microbatch = data["types"][group["type"][k]]["label"], group["microbatch"][k]
            assert parse_task(label if microbatch < 0 else f"{label}__{microbatch}") == task
        assert all(groups[number] != g for number in group["waited"][:-1] if number >= 0)


def test_simulated_steps_have_all_tasks(profile, data):
    for number, simulation in enumerate(data["simulations"]):
        ends = []
        for group in data["groups"]:
            took = [simulation["took"][t] for t in group["type"]]
            ends.append(sum(group["simulated"][number]) + sum(took))
            assert len(group["simulated"][number]) == len(took)
        assert max(ends) == simulation["makespan"]
    assert data["simulations"][-1]["makespan"] == profile.attribution.ideal.makespan


def test_fused_tasks_have_their_own_names(monkeypatch):
    """A cell of two tasks is of two microbatches, so its type and one microbatch do not name it."""
    monkeypatch.setattr("tests.support.small_plans.MICROBATCHES", 8)
    plan = lowered(DualPipeV(4, 2), [{}] * 2).plan
    group = page_data(drawn_profile(plan)._subject("Measured"))["groups"][0]
    fused = [run.task.tasks for run in plan.programs[0].runs if isinstance(run.task, FusedTask)]
    assert fused
    assert list(group["names"].values()) == [" + ".join(map(str, tasks)) for tasks in fused]


def test_types_have_all_tasks_once(data):
    rows = rows_of(data, "tasks")
    assert sum(row["Count"] for row in rows) == 2 * GROUPS * (MICROBATCHES + 1)
    assert sum(row["Sum"] for row in rows) == sum(sum(g["took"]) for g in data["groups"])
    for row, each in zip(rows, data["types"], strict=True):
        assert (row["Task"][0], row["Group"]) == (each["label"], each["group"])
        assert row["Median"] > 0 and row["95th percentile"] <= row["Longest"]
        assert row["Runs"] == ["model.py:12 layer", HOSTILE]


@pytest.mark.parametrize(("values", "expected"), [([7], 7), ([*range(1, 21)], 19), ([*range(1, 101)], 95)])
def test_percentile_is_the_least_value_that_95_of_100_do_not_exceed(values, expected):
    assert percentile(values, 0.95) == expected


def test_messages_are_those_of_the_plan(data):
    edges = rows_of(data, "messages")
    pairs = [pair for a, b in itertools.pairwise(range(GROUPS)) for pair in ((a, b), (b, a))]
    assert {edge["Groups"] for edge in edges} == {f"{src} to {dst}" for src, dst in pairs}
    for edge in edges:
        assert (edge["Messages"], edge["Bytes"]) == (MICROBATCHES, MICROBATCHES * ACTIVATION.nbytes)
        assert 20_000 <= edge["In flight, median"] < 200_000


def test_stages_have_their_times_and_sources(data):
    stages = rows_of(data, "stages")
    assert [stage["Group"] for stage in stages] == [str(group) for group in range(GROUPS)]
    times = [stage["Time of a microbatch"] for stage in stages]
    assert max(times) == times[1] > 1.2 * times[0]
    assert not any(stage["Layers"] for stage in stages)
    assert all(stage["Runs"] == ["model.py:12 layer", HOSTILE] for stage in stages)


def test_processes_have_their_times_and_nodes(profile, data):
    step = profile.steps[profile.attribution.measured.step]
    for shown, process in zip(rows_of(data, "processes"), step.processes, strict=True):
        assert (shown["Group"], shown["Process"], shown["Node"]) == (process.mpmd_idx, 0, HOSTILE)
        assert 0 < shown["Request"] == process.received < shown["Ready"] < shown["Finished"]
        assert shown["Finished"] <= shown["Replied"]


def test_memory_is_that_of_the_profile(profile, data):
    table = rows_of(data, "memory")
    for memory, shown, row in zip(profile.memory, data["memory"]["groups"], table, strict=True):
        time, peak = memory.peak
        assert row["Peak"] == sum(data["memory"]["rows"][shown["row"][shown["peak"]]]) == peak.total
        assert sum(shown["steps"][: shown["peak"] + 1]) == time
        assert sum(shown["steps"]) == memory.times[-1]


def test_long_memory_keeps_its_peaks(profile, monkeypatch):
    subject = profile._subject("Measured")
    whole = memory_data(subject)
    monkeypatch.setattr("mpmd.render.page.memory.MOST_MOMENTS", 50)
    short = memory_data(subject)
    assert sum(len(group["row"]) for group in short["groups"]) <= 50 + GROUPS
    for data in (short, whole):
        peaks = [sum(data["rows"][group["row"][group["peak"]]]) for group in data["groups"]]
        assert peaks == [memory.peak[1].total for memory in profile.memory]
    assert whole["note"] is None
    assert "the most bytes" in short["note"]


def changes(before, after):
    """The section on what changed, as the only one of a page."""
    section = changes_data(before._subject("Before"), after._subject("After"))
    return section["notes"], {"sections": [section]}


def test_parts_of_a_comparison_add_up_to_the_steps(profile, balanced_profile):
    sentences, data = changes(profile, balanced_profile)
    lengths = [each.attribution.measured.returned for each in (profile, balanced_profile)]
    parts = rows_of(data, "changed")
    assert [sum(part[title] for part in parts) for title in ("Before", "After")] == pytest.approx(lengths)
    assert "less" in sentences[0]
    assert any("imbalance" in sentence for sentence in sentences)
    types = rows_of(data, "changed", 1)
    slow = next(each for each in types if (each["Task"], each["Group"]) == ("bwd_1", 1))
    assert slow["After"] < 0.9 * slow["Before"]


def test_stages_of_a_scan_have_their_layers():
    mesh = mpmd.AbstractMpmdMesh({"stage": 2}, "stage")
    arguments = jax.ShapeDtypeStruct((6, 4, 4), np.float32), jax.ShapeDtypeStruct((4, 2, 4), np.float32)
    plan = mpmd.jit(stacked_step(2), mesh).lower(*arguments).plan
    stages = rows_of(page_data(drawn_profile(plan)._subject("x")), "stages")
    assert [stage["Layers"] for stage in stages] == ["0..2", "3..5"]


def test_recorded_steps_are_counted_with_those_that_are_left_out(profile):
    first, *others = profile.recorded
    disturbed = dataclasses.replace(profile, recorded=(*others, recovered(first)))
    facts = {fact.label: fact.value for fact in page_data(disturbed._subject("x"))["facts"]}
    shown = disturbed.attribution.measured.step
    assert facts["Recorded step"] == f"{shown + 1} of 3"
    assert facts["Recovery before step 3"] == disturbed.recoveries[2]


def test_a_step_beside_itself_is_as_long(profile):
    sentences, _ = changes(profile, profile)
    assert sentences == [
        f"The step takes {time_text(profile.attribution.measured.returned)}, as long as before."
    ]


def test_a_comparison_of_other_sizes(profile):
    other = drawn_profile(pipeline_plan(mpmd.Std1F1B(2), 4))
    sentences, data = changes(profile, other)
    assert any("4 groups before and 2 after" in sentence for sentence in sentences)
    gone = next(each for each in rows_of(data, "changed", 1) if each["Group"] == 3)
    assert gone["After"] is None
    assert gone["Change of the sum"] < 0


def test_names_stay_text(data):
    html = document(data, HOSTILE)
    assert html.count("</script>") == html.count("<script") == 2
    assert "<img" not in html
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1]
    assert json.loads(embedded) == json.loads(json.dumps(data))
    assert "&lt;/script&gt;" in re.search("<title>(.*?)</title>", html)[1]


def test_the_policy_forbids_all_but_the_page_itself(page_file):
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page_file.read_text())[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].startswith("'sha256-")
    assert "unsafe" not in policy


SEEN_WITHOUT = {
    "red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "a fault": np.eye(3),
}
"""Colours as people see them; source: Machado et al., "A physiologically-based model for simulation of color
vision deficiency", 2009, table 1."""


def lab(linear):
    """Linear sRGB as CIE L*a*b*."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 0.0089))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_colours_can_be_told_apart():
    for table, theme in itertools.product((CAUSES, MEMORY), ("colour", "dark")):
        for vision in SEEN_WITHOUT.values():
            assert not alike([part[theme] for part in table.values()], np.array(vision))


def alike(colours, vision):
    """The pairs of colours that can hardly be told apart, with their distances."""
    seen = []
    for colour in colours:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        seen.append(lab(np.clip(vision @ linear, 0, 1)))
    distances = {
        (a, b): np.linalg.norm(seen[a] - seen[b]) for a, b in itertools.combinations(range(len(colours)), 2)
    }
    return {f"{colours[a]} {colours[b]}": round(d) for (a, b), d in distances.items() if d < 12}
