"""``python -m benchmarks.device``: its page and JSON, the pure parts of sections, and slowly all of it."""

import json
import os

import pytest

import mpmd
from benchmarks.device import (
    __main__ as command,
)
from benchmarks.device import (
    bits,
    conformance,
    curves,
    gpt,
    installed,
    memory,
    recovery,
    several_devices,
    trace,
    transports,
)
from benchmarks.device.gpt_step import LARGE
from benchmarks.device.outcome import Findings, Outcome, Section
from benchmarks.device.page import document, file_name, page
from benchmarks.device.running import run_section
from benchmarks.device.sections import SECTIONS
from benchmarks.device.settings import Settings, settings_of
from benchmarks.measure import Table
from mpmd.cli.doctor import Finding, State
from mpmd.ir.events import Event, Wait
from mpmd.ir.plan import Task
from mpmd.runtime.device_trace import program_name
from tests.support.small_plans import lowered

CPU = Settings("cpu", "cpu", 8, quick=True)
GPU = Settings("cuda", "NVIDIA H200 NVL", 1, quick=False)


def section(name="a"):
    return Section(name, f"Section {name}", 10, lambda settings: Findings((), {}))


# What is written.

RECORDED = [
    Outcome("a", "The first", 3.2, Findings((Table("Rates", ("size", "GB/s"), (("1 MiB", "7.5"),)),), [7.5])),
    Outcome("b", "The second", 1.0, Findings((), {}, ("the loss is nan",))),
    Outcome("c", "The third", 60.0, None, "not finished within 60 s\nlast line"),
]
PAGE = """\
# 1 x NVIDIA H200 NVL (cuda), 2026-11-23

**Sections**

| section    |         |  s |
| ---------- | ------: | -: |
| The first  |      ok |  3 |
| The second | 1 fault |  1 |
| The third  |  failed | 60 |

## The first

**Rates**

| size  | GB/s |
| ----- | ---: |
| 1 MiB |  7.5 |

## The second

- fault: the loss is nan

## The third

failed: not finished within 60 s

```
last line
```

**Machine**

|       | value |
| ----- | ----: |
| cores |    16 |
"""


def test_the_page_is_made_of_what_the_json_has():
    written = json.dumps(document(GPU, "2026-11-23", {"cores": "16"}, RECORDED))
    read = json.loads(written)
    assert [Outcome.from_json(values) for values in read["sections"]] == RECORDED
    assert page(read) == PAGE
    assert file_name(GPU, "2026-11-23") == "nvidia-h200-nvl-x1-2026-11-23"
    assert (read["device"], read["date"]) == ("NVIDIA H200 NVL", "2026-11-23")


# How sections are run.


def run_python(code, limit=60):
    return run_section(section(), CPU, limit, command=("-c", f"import sys\n{code}"))


def test_a_section_runs_in_a_process_and_returns_what_it_writes():
    findings = {"tables": [{"title": "T", "header": ["a"], "rows": [["1"]]}], "data": [1.5], "faults": []}
    outcome = run_python(f"print('noise'); open(sys.argv[3], 'w').write({json.dumps(findings)!r})")
    assert outcome.findings == Findings((Table("T", ("a",), (("1",),)),), [1.5])
    assert (outcome.verdict, outcome.name) == ("ok", "a")


@pytest.mark.parametrize(
    ("code", "limit", "first", "last"),
    [
        ("print('x'); raise ValueError('no such thing')", 60, "exit status 1", "ValueError: no such thing"),
        ("import os; print('x', flush=True); os.abort()", 60, "killed by SIGABRT", "x"),
        ("import time; print('x', flush=True); time.sleep(600)", 5, "not finished within 5 s", "x"),
        ("print('x')", -1, "not finished within -1 s", None),
    ],
)
def test_a_section_that_fails_says_why_and_what_it_wrote_last(code, limit, first, last):
    outcome = run_python(code, limit)
    lines = outcome.failure.splitlines()
    assert (outcome.verdict, lines[0]) == ("failed", first)
    assert last is None or lines[-1] == last


def test_what_a_section_started_ends_with_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = f"import os, subprocess\nend = os.open({str(pipe)!r}, os.O_WRONLY)"
    code += "\nsubprocess.Popen(['sleep', '600'], pass_fds=[end])\nraise SystemExit(3)"
    assert run_python(code).failure == "exit status 3"
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # which is when no process has the other end
    os.close(reader)


def test_all_sections_are_run_and_the_last_ones_get_what_time_is_left(monkeypatch):
    limits = []

    def run_one(section, settings, limit):
        limits.append(limit)
        return Outcome(section.name, section.title, 0.0, Findings((), {}))

    monkeypatch.setattr(command, "run_section", run_one)
    sections = [Section(str(i), "", 300, section().run) for i in range(3)]
    assert [outcome.name for outcome in command.run_all(sections, CPU, 1.0)] == ["0", "1", "2"]
    assert limits[:1] == [300] and all(limit <= 300 for limit in limits)
    monkeypatch.setattr(command, "TOTAL_SECONDS", 100.0)
    command.run_all(sections, CPU, 1.0)
    assert all(limit <= 100 for limit in limits[3:])


def test_the_limits_leave_the_programs_time_within_ten_minutes():
    *others, programs = SECTIONS
    assert programs.name == "conformance" and command.TOTAL_SECONDS < 600
    assert sum(each.limit for each in others) + 150 <= command.TOTAL_SECONDS


def test_without_an_accelerator_nothing_is_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "find", lambda platform, quick: None)
    monkeypatch.setattr(command, "run_section", lambda *_: pytest.fail("a section ran"))
    assert command.main(["--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("outcome", "status"), list(zip(RECORDED, (0, 1, 1), strict=True)))
def test_what_is_not_well_is_the_exit_status(outcome, status, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "run_section", lambda *_: outcome)
    arguments = ["recovery", "--platform", "cpu", "--output", str(tmp_path)]
    assert command.main(arguments) == status
    (text,), (data,) = tmp_path.glob("cpu-x8-*.md"), tmp_path.glob("cpu-x8-*.json")
    assert text.read_text() == page(json.loads(data.read_text()))
    assert outcome.title in capsys.readouterr().out


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.parse_arguments(["nothing"])
    assert "no section nothing; there are installed, gpt" in capsys.readouterr().err


# The devices.


def test_what_jax_finds():
    assert settings_of('a warning\n["cuda", "NVIDIA L4", 2]\n', True) == Settings(
        "cuda", "NVIDIA L4", 2, True
    )
    assert settings_of('["cpu", "cpu", 1]', False) is None


@pytest.mark.parametrize(("devices", "parts"), [(1, [0.25, 0.25]), (2, [1, 0.25]), (4, [1, 1])])
def test_groups_have_a_gpu_each_or_a_quarter(devices, parts):
    settings = Settings("cuda", "L4", devices, False)
    assert [settings.gpus_of(groups) for groups in (2, 4)] == parts


def test_the_process_of_a_section_leaves_memory_to_the_groups():
    assert GPU.environment() == {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert CPU.environment()["JAX_NUM_CPU_DEVICES"] == "8"


# The sections.


def test_forty_programs_fit_four_groups_of_one_device():
    programs = conformance.programs()
    assert len({program.name for program in programs}) == len(programs) == 40
    cases = [program.case() for program in programs]
    assert all(case.groups <= conformance.GROUPS and not case.axes for case in cases)


def test_programs_that_differ_are_faults():
    findings = conformance.findings_of(["a", "b", "c"], {"a": "", "b": "AssertionError: x"})
    assert findings.faults == ("b: AssertionError: x",)
    assert [row[1] for row in findings.tables[0].rows] == ["1", "1", "1"]


def test_executables_that_do_not_repeat_are_named():
    same, other = [["1"], ["1"]], [["1"], ["2"]]
    usual = [
        {bits.STEP: other, "fwd_0": same, "bwd_0": other},
        {bits.STEP: same, "fwd_0": same, "bwd_0": same},
    ]
    asked = [
        {bits.STEP: same, "fwd_0": same, "bwd_0": same},
        {bits.STEP: same, "fwd_0": same, "bwd_0": [["3"]] * 2},
    ]
    findings = bits.findings_of(dict(zip(bits.WAYS, (usual, asked), strict=True)))
    assert [row[2:] for row in findings.tables[0].rows] == [
        ("no", "bwd_0"),
        ("yes", "none"),
        ("yes", "none"),
        ("yes", "bwd_0"),
    ]
    assert not findings.faults
    swapped = bits.findings_of(dict(zip(bits.WAYS, (asked, usual), strict=True)))
    assert len(swapped.faults) == 1


def test_losses_after_a_recovery_have_to_be_equal():
    assert not recovery.findings_of({"started": 2.0}, [1.0, 0.5], [1.0, 0.5]).faults
    assert recovery.findings_of({"started": 2.0}, [1.0, 0.5], [1.0, 0.25]).faults


def test_memory_is_compared_where_it_is_counted():
    peaks = [memory.Peak("here", 0, 2**20, 2**21), memory.Peak("there", 1, 2**20, None)]
    rows = memory.findings_of(peaks).tables[0].rows
    assert [row[-1] for row in rows] == ["2.00", ""]
    assert rows[1][2] == "not counted"


def test_the_tasks_of_an_executable_are_added_up():
    plan = lowered(mpmd.Std1F1B(1), [{}]).plan
    runs = [run for run in plan.programs[0].runs if isinstance(run.task, Task)]
    events = [Event(0, run.task, 1.0, 1.25) for run in runs] + [Event(0, Wait(1), 0.0, 9.0)]
    findings = trace.findings_of(plan, events, dict.fromkeys({run.executable for run in runs}, 0.5))
    assert sum(findings.data["host"].values()) == pytest.approx(0.25 * len(runs))
    assert all(row[1] == "500.000" for row in findings.tables[0].rows)
    assert not findings.faults
    assert trace.findings_of(plan, events, None).faults


def test_losses_of_a_gpt_have_to_be_close():
    each = {"jit": [1.0, 1.0], "mpmd": [2.0, 2.0], "losses": [[5.0, 4.0], [5.0, 4.001]]}
    findings = gpt.findings_of(GPU, {"2 on Ray": each})
    assert findings.tables[0].rows == (("2 on Ray", "1000.00", "2000.00", "2.00", "1.0e-03"),)
    assert str(LARGE.width) in findings.tables[0].title and not findings.faults
    for wrong in (4.5, float("nan")):
        assert gpt.findings_of(GPU, {"x": each | {"losses": [[5.0], [wrong]]}}).faults
        assert several_devices.findings_of(2, {"in process": wrong}, 5.0).faults


def test_a_curve_has_rates():
    findings = curves.findings_of({("memory", "B/s"): [curves.Point("1 KiB", 1024.0, 1e-6)]})
    assert findings.tables[0].rows == (("1 KiB", "1.0", "1.02e+09"),)
    assert findings.data["memory"]["points"] == [{"size": "1 KiB", "amount": 1024.0, "seconds": 1e-6}]
    assert transports.row_of(2**20, 1e-3, 1e-3) == ("1 MiB", "1000", "1000", "1.05")


def test_findings_of_the_doctor_are_rows():
    finding = Finding("devices", State.FAULT, "an | error\n  here", "install it")
    assert installed.row_of(finding) == ("devices", "FAULT", "an / error here -> install it")


# All of it.


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_sections_run_on_cpus(tmp_path):
    assert command.main(["--platform", "cpu", "--patience", "3", "--output", str(tmp_path)]) == 0
    (data,) = tmp_path.glob("*.json")
    outcomes = [Outcome.from_json(values) for values in json.loads(data.read_text())["sections"]]
    assert [outcome.name for outcome in outcomes] == [each.name for each in SECTIONS]
    by_name = {outcome.name: outcome.findings.data for outcome in outcomes}
    assert len(by_name["conformance"]["failures"]) == len(conformance.NAMES)
    assert set(by_name["gpt"]) == {"1 in process", "2 in process", "2 on Ray", "4 in process", "4 on Ray"}
    assert set(by_name["several-devices"]["losses"]) == {"in process", "on Ray"}
    assert by_name["bits"][bits.DETERMINISTIC] == {"again": [], "another process": []}
    assert by_name["trace"]["device"].keys() == set(map(program_name, by_name["trace"]["host"]))
