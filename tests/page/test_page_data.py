"""The data of pages: sums that are exact, numbers that lead to the right tasks, and names that stay text."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.attribution.gaps import Causes
from mpmd.ir.tasks import FusedTask, parse_task
from mpmd.memory import MemoryParts
from mpmd.render.page.advice import _capitalized
from mpmd.render.page.changes import comparison_data, duration
from mpmd.render.page.document import document
from mpmd.render.page.memory import memory_data
from mpmd.render.page.palette import CAUSES, MEMORY
from mpmd.render.page.profile_data import profile_data
from mpmd.render.page.tables import percentile
from mpmd.schedules import DualPipeV
from tests.page.conftest import GROUPS, HOSTILE, MICROBATCHES
from tests.support.drawn_profiles import drawn_profile
from tests.support.schedule_plans import plan_of_schedule
from tests.support.small_plans import lowered


@pytest.fixture(scope="module")
def data(profile):
    return profile_data(profile._subject("Measured"))


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
    for group in data["groups"]:
        for k, idle in enumerate(group["idle"]):
            assert sum(cause[k] for cause in group["causes"] if cause) == idle
        sums = [sum(cause) for cause in group["causes"]]
        assert sums == group["cause_totals"]
        assert sum(sums) == group["idle_total"] == data["makespan"] - sum(group["took"])
    totals = np.sum([group["cause_totals"] for group in data["groups"]], axis=0)
    assert [cause["total"] for cause in data["causes"]] == list(totals)
    assert data["idle"] == sum(totals)


def test_longest_gaps_are_those_with_the_most_beyond_the_fill(data):
    beyond = [wait["beyond_fill"] for wait in data["waits"]]
    assert beyond == sorted(beyond, reverse=True)
    for wait in data["waits"]:
        group = data["groups"][wait["group"]]
        fill, *others = (cause[wait["k"]] if cause else 0 for cause in group["causes"])
        assert (sum(others), fill + sum(others)) == (wait["beyond_fill"], wait["length"])
        assert wait["cause"] == 1 + others.index(max(others))


def test_findings_and_scenarios_are_those_of_the_profile(profile, data):
    assert [finding["saves"] for finding in data["findings"]] == [f.share_saved for f in profile.findings]
    for shown, finding in zip(data["findings"], profile.findings, strict=True):
        assert shown["text"].lower() == f"{finding.text.lower()}."
    first, *others = data["scenarios"]
    assert first["makespan"] == profile.scenarios[0].makespan
    assert [each["makespan"] for each in others] == [each.makespan for each in profile.scenarios[1:]]


def test_findings_about_tasks_begin_with_the_task_as_it_is_written():
    assert _capitalized("bwdW_2 on group 2 took longer") == "bwdW_2 on group 2 took longer"
    assert _capitalized("group 2 has more work") == "Group 2 has more work"


def test_all_causes_and_purposes_have_looks():
    assert list(CAUSES) == list(Causes._fields)
    assert list(MEMORY) == [field.name for field in dataclasses.fields(MemoryParts)]


def test_the_critical_path_has_no_hole(data):
    path = data["path"]
    assert path["start"][0] == 0
    assert path["end"][-1] == data["makespan"]
    assert path["start"][1:] == path["end"][:-1]
    assert sum(kind["total"] for kind in path["kinds"]) == data["makespan"]


def test_numbers_are_those_of_tasks(profile, data):
    """The names that the page writes are those of the plan's tasks, and gaps wait for other groups."""
    measured = profile.attribution.measured
    groups = [g for g, group in enumerate(data["groups"]) for _ in group["took"]]
    for g, group in enumerate(data["groups"]):
        tasks = [measured.workload.tasks[i] for i in measured.tasks(g)]
        for k, task in enumerate(tasks):
            label = data["types"][group["type"][k]]["label"]
            assert parse_task(f"{label}__{group['microbatch'][k]}") == task
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
    group = profile_data(drawn_profile(plan)._subject("Measured"))["groups"][0]
    fused = [run.task.tasks for run in plan.programs[0].runs if isinstance(run.task, FusedTask)]
    assert fused
    assert list(group["names"].values()) == [" + ".join(map(str, tasks)) for tasks in fused]


def test_types_have_all_tasks_once(data):
    assert sum(each["count"] for each in data["types"]) == 2 * GROUPS * MICROBATCHES
    assert sum(each["total"] for each in data["types"]) == sum(sum(g["took"]) for g in data["groups"])
    for each in data["types"]:
        assert each["median"] > 0 and each["p95"] <= each["longest"]
        assert each["sources"] == ["model.py:12 layer", HOSTILE]


@pytest.mark.parametrize(("values", "expected"), [([7], 7), ([*range(1, 21)], 19), ([*range(1, 101)], 95)])
def test_percentile_is_the_least_value_that_95_of_100_do_not_exceed(values, expected):
    assert percentile(values, 0.95) == expected


def test_messages_are_those_of_the_plan(data):
    pairs = {(edge["src"], edge["dst"]) for edge in data["edges"]}
    assert pairs == {pair for a, b in itertools.pairwise(range(GROUPS)) for pair in ((a, b), (b, a))}
    assert all(
        edge["count"] == MICROBATCHES and edge["bytes"] == MICROBATCHES * 2**18 for edge in data["edges"]
    )
    assert all(20_000 <= edge["flight"] < 200_000 for edge in data["edges"])


def test_stages_have_their_times_and_sources(data):
    assert [stage["groups"] for stage in data["stages"]] == [[g] for g in range(GROUPS)]
    times = [stage["time"] for stage in data["stages"]]
    assert max(times) == times[1] > 1.2 * times[0]
    assert not any(stage["layers"] for stage in data["stages"])
    assert all(stage["sources"] == ["model.py:12 layer", HOSTILE] for stage in data["stages"])


def test_processes_have_their_times_and_nodes(profile, data):
    step = profile.steps[profile.attribution.measured.step]
    for shown, process in zip(data["processes"], step.processes, strict=True):
        assert (shown["group"], shown["rank"], shown["node"]) == (process.mpmd_idx, 0, HOSTILE)
        assert (
            0 < shown["received"] == process.received < shown["ready"] < shown["finished"] <= shown["replied"]
        )


def test_memory_is_that_of_the_profile(profile, data):
    for memory, shown in zip(profile._subject("").memory, data["memory"]["groups"], strict=True):
        _, peak = memory.peak
        assert shown["peak"]["bytes"] == peak.total
        assert sum(data["memory"]["rows"][shown["peak"]["row"]]) == peak.total
        assert sum(shown["steps"]) == memory.times[-1]


def test_long_memory_keeps_its_peaks(profile, monkeypatch):
    subject = profile._subject("Measured")
    whole = memory_data(subject)
    monkeypatch.setattr("mpmd.render.page.memory.MOST_MOMENTS", 50)
    short = memory_data(subject)
    assert sum(len(group["row"]) for group in short["groups"]) <= 50 + GROUPS
    assert [g["peak"]["bytes"] for g in short["groups"]] == [g["peak"]["bytes"] for g in whole["groups"]]
    assert whole["note"] is None
    assert "the most bytes" in short["note"]


def test_parts_of_a_comparison_add_up_to_the_steps(profile, balanced_profile):
    before, after = (profile_data(p._subject("x")) for p in (profile, balanced_profile))
    change = comparison_data(before, after)
    assert sum(part["before"] for part in change["parts"]) == pytest.approx(before["makespan"])
    assert sum(part["after"] for part in change["parts"]) == pytest.approx(after["makespan"])
    assert "less" in change["sentences"][0]
    assert any("imbalance" in sentence for sentence in change["sentences"])
    slow = next(each for each in change["types"] if (each["label"], each["group"]) == ("bwd_1", 1))
    assert slow["after"] < 0.9 * slow["before"]


def test_stages_of_a_scan_have_their_layers():
    def loss_of(weights, x):
        def layer(x, weight):
            return mpmd.mark_stage_end(jnp.tanh(x @ weight), every=3), None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    def step(weights, xs):
        return mpmd.treduce(
            lambda x: jax.value_and_grad(loss_of)(weights, x), xs, mpmd.Std1F1B(2), operation=mpmd.Add
        )

    mesh = mpmd.AbstractMpmdMesh({"stage": 2}, "stage")
    arguments = jax.ShapeDtypeStruct((6, 4, 4), np.float32), jax.ShapeDtypeStruct((4, 2, 4), np.float32)
    plan = mpmd.jit(step, mesh).lower(*arguments).plan
    stages = profile_data(drawn_profile(plan)._subject("x"))["stages"]
    assert [stage["layers"] for stage in stages] == [["0 to 2"], ["3 to 5"]]


def test_recorded_steps_are_counted_with_those_that_are_left_out(profile):
    first, *others = profile.recorded
    delay = 10**9
    processes = tuple(times.shifted(delay) for times in first.processes)
    first = dataclasses.replace(
        first, returned=first.returned + delay, processes=processes, is_recovered=True
    )
    recovered = dataclasses.replace(profile, recorded=(*others, first))
    facts = {fact["label"]: fact["value"] for fact in profile_data(recovered._subject("x"))["facts"]}
    shown = recovered.attribution.measured.step
    assert facts["Recorded step"] == f"{shown + 1} of 3"
    assert facts["Recovery before step 3"] == recovered.recoveries[2]


def test_a_step_beside_itself_is_as_long(profile):
    data = profile_data(profile._subject("x"))
    assert comparison_data(data, data)["sentences"] == [
        f"The step takes {duration(data['makespan'])}, as long as before."
    ]


def test_a_comparison_of_other_sizes(profile):
    other = drawn_profile(plan_of_schedule(mpmd.Std1F1B(2), 4))
    change = comparison_data(*(profile_data(p._subject("x")) for p in (profile, other)))
    assert any("4 groups before and 2 after" in sentence for sentence in change["sentences"])
    gone = next(each for each in change["types"] if each["group"] == 3)
    assert (gone["after"], gone["sum_after"]) == (None, 0)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 µs"),
        (43e6, "43.0 ms"),
        (-5e8, "-500 ms"),
        (2.5e9, "2.50 s"),
    ],
)
def test_durations_as_text(nanoseconds, text):
    assert duration(nanoseconds) == text


def test_names_stay_text(data):
    html = document({"profiles": [data], "comparison": None}, HOSTILE)
    assert html.count("</script>") == html.count("<script") == 2
    assert "<img" not in html
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1]
    assert json.loads(embedded)["profiles"][0] == json.loads(json.dumps(data))
    assert "&lt;/script&gt;" in re.search("<title>(.*?)</title>", html)[1]


def test_titles_that_are_no_unicode(data):
    document({"profiles": [data], "comparison": None}, "step-\udcff").encode()


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


@pytest.mark.parametrize("missing", SEEN_WITHOUT)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("table", [CAUSES, MEMORY], ids=["causes", "memory"])
def test_colours_can_be_told_apart(table, dark, missing):
    seen, colours = [], [look.dark if dark else look.colour for look in table.values()]
    for colour in colours:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        seen.append(lab(np.clip(np.array(SEEN_WITHOUT[missing]) @ linear, 0, 1)))
    distances = {
        (a, b): np.linalg.norm(seen[a] - seen[b]) for a, b in itertools.combinations(range(len(colours)), 2)
    }
    near = {f"{colours[a]} {colours[b]}": round(d) for (a, b), d in distances.items() if d < 12}
    assert not near
