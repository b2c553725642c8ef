"""``python -m benchmarks``: options, tables and JSON, processes of benchmarks, and plans by hand."""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import mpmd
from benchmarks import __main__ as command
from benchmarks.frame import Limited, Setup, in_process_mesh, interleaved, ratio
from benchmarks.host import Host
from benchmarks.planned_models import MODELS, balanced, by_hand, equal_layers, large_vocabulary, mlp, u_net
from benchmarks.report import Outcome, document, page, table

ROOT = Path(__file__).parents[1]
OPTIONS = argparse.Namespace(quick=False, device=False, patience=1.0)
GPU = Setup(OPTIONS, 2, "cuda", "NVIDIA H200 NVL", 1)

# Options.


def test_each_benchmark_is_a_module():
    assert all(importlib.util.find_spec(f"benchmarks.{name}") for name in command.BENCHMARKS)


def test_pages_and_docstrings_name_commands_that_exist():
    paths = [ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    paths += [
        path for room in ("mpmd", "cluster", "tests", "benchmarks") for path in (ROOT / room).rglob("*.py")
    ]
    missing = []
    for path in paths:
        if path.name == "CHANGELOG.md":  # has commands of earlier versions
            continue
        for module, names in re.findall(r"-m (benchmarks[\w.]*)((?: [a-z]+)*)", path.read_text()):
            if module != "benchmarks":
                missing += [] if (ROOT / f"{module.replace('.', '/')}.py").exists() else [(path.name, module)]
            else:
                missing += [(path.name, name) for name in names.split()[:1] if name not in command.BENCHMARKS]
    assert not missing


def test_without_names_all_benchmarks_run_that_are_not_for_devices_alone():
    args = command.parse_arguments(["--quick"])
    assert set(command.BENCHMARKS) - set(args.names) == {"chaos", "device", "conformance"}
    assert command.parse_arguments(["--device"]).names == list(command.DEVICE_LIMITS)


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["nothing"], "no benchmark nothing here; there are transport, overhead"),
        (["startup", "--device"], "no benchmark startup here; there are transport, throughput"),
        (["--platform", "cpu"], "--platform is for --device"),
    ],
)
def test_options_that_do_not_fit_are_refused(argv, fault, capsys):
    with pytest.raises(SystemExit):
        command.parse_arguments(argv)
    assert fault in capsys.readouterr().err


def test_the_limits_of_devices_leave_time_within_ten_minutes():
    assert sum(command.DEVICE_LIMITS.values()) < 590


# Measurements, tables and JSON.


def test_things_are_measured_in_turns():
    calls = []
    things = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert interleaved(things, 2) == {"a": (1, 4), "b": (2, 3)}
    assert "".join(calls) == "abba"
    assert ratio((2.0, 3.0, 8.0), (1.0, 3.0, 2.0)) == 2.0


OUTCOMES = [
    Outcome(
        "a", 3.2, {"Rates": [{"size": "1 MiB", "GB/s": (7.0, 7.456, 9.0), "of tcp": Limited(0.4, 0.5, True)}]}
    ),
    Outcome("b", 60.0, {}, "b: not finished within 60 s"),
]
PAGE = """\
# 1 x NVIDIA H200 NVL (cuda), DATE

**Benchmarks**

| benchmark |        |   s |
| --------- | ------ | --: |
| a         | ok     | 3.2 |
| b         | failed |  60 |

## a

**Rates**

| size  | GB/s |    of tcp |
| ----- | ---: | --------: |
| 1 MiB | 7.46 | 0.4 < 0.5 |

## b

failed: b: not finished within 60 s

**Machine**

|       | value |
| ----- | ----- |
| cores | 16    |
"""


def test_a_page_has_the_tables_of_all_benchmarks():
    text = page(GPU, {"cores": "16"}, OUTCOMES)
    assert re.sub(r"\d{4}-\d\d-\d\d", "DATE", text) == PAGE


def test_json_has_all_repetitions_and_the_limits():
    read = json.loads(json.dumps(document(GPU, {"cores": "16"}, OUTCOMES)))
    (row,) = read["benchmarks"]["a"]["tables"]["Rates"]
    assert row["GB/s"] == [7.0, 7.456, 9.0]
    assert row["of tcp"] == {"value": 0.4, "limit": 0.5, "at_least": True}
    assert read["benchmarks"]["b"]["failure"].endswith("60 s")


def test_values_beyond_their_limits_are_listed():
    (missed,) = OUTCOMES[0].missed()
    assert (missed["row"], missed["column"]) == ("1 MiB", "of tcp")
    kept = Outcome("a", 1.0, {"T": [{"x": Limited(0.5, 0.5, True), "y": Limited(1.0, 1.0)}]})
    assert not kept.missed()


def test_rows_may_lack_columns_and_large_numbers_have_commas():
    text = table("T", [{"a": "x|\ny", "b": 1234.5}, {"a": "z", "c": 12}])
    assert text.splitlines()[-2:] == ["| x/ y | 1,234 |    |", "| z    |       | 12 |"]


# Devices.


def test_without_an_accelerator_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_devices", lambda platform, setup: None)
    monkeypatch.setattr(command, "run_apart", lambda *_: pytest.fail("a benchmark ran"))
    assert command.main(["--device"]) == 0
    assert capsys.readouterr().out.startswith("no accelerator: ")


@pytest.mark.parametrize(("outcome", "status"), list(zip(OUTCOMES, (0, 1), strict=True)))
def test_a_failure_is_the_exit_status_and_results_are_written(outcome, status, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "run_apart", lambda *_: outcome)
    files = ["--json", str(tmp_path / "b" / "a.json"), "--page", str(tmp_path / "a.md")]
    assert command.main(["recovery", "--device", "--platform", "cpu", *files]) == status
    assert str(outcome) in capsys.readouterr().out
    assert str(outcome) in (tmp_path / "a.md").read_text()
    assert outcome.name in json.loads((tmp_path / "b" / "a.json").read_text())["benchmarks"]


def test_results_of_a_device_are_named_by_it():
    assert re.fullmatch(r"docs/device/nvidia-h200-nvl-x1-[\d-]+\.md", str(command.default_path(GPU, "md")))


@pytest.mark.parametrize(("devices", "gpus"), [(1, 0.25), (2, 0.25), (4, 1)])
def test_groups_have_a_gpu_each_or_a_quarter(devices, gpus):
    assert dataclasses.replace(GPU, devices=devices).gpus_per_group == gpus
    assert Setup(OPTIONS, 2).gpus_per_group is None


def test_a_process_beside_groups_leaves_them_memory():
    assert GPU.environment(1, 2) == {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert Setup(OPTIONS, 2).environment(4, 2)["JAX_NUM_CPU_DEVICES"] == "4"


# Processes.


class Hosted:
    """Does what the tests of processes ask."""

    def __init__(self, pipe=""):
        self.pipe = os.open(pipe, os.O_WRONLY) if pipe else None

    def fail(self):
        raise ValueError("no such thing")

    def abort(self):
        os.abort()

    def start_another(self):
        return subprocess.Popen(["sleep", "600"], pass_fds=[self.pipe]).pid

    def pid(self):
        return os.getpid()

    def wait(self):
        threading.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "timeout", "words"),
    [
        ("fail", None, "Hosted failed:.*ValueError: no such thing"),
        ("abort", None, "killed by SIGABRT"),
        ("wait", 0, "not finished within 0 s"),
    ],
)
def test_a_call_that_fails_says_why(method, timeout, words):
    with (
        Host("tests.test_benchmarks:Hosted", (), {}) as host,
        pytest.raises(RuntimeError, match=f"(?s){words}"),
    ):
        host.call(method, timeout=timeout)


@pytest.mark.slow
def test_processes_that_a_leader_starts_end_with_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with Host("tests.test_benchmarks:Hosted", (str(pipe),), {}, leads=True) as host:
        child = host.call("start_another")
        assert os.getpgid(child) == host.call("pid")
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # which is when no process has the other end
    os.close(reader)


# Plans by hand.


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [u_net(4, 8, 4), large_vocabulary(2, 8, 2, 4, 32, rows=4), mlp((4, 8, 16, 4), rows=4)],
    ids=["U-Net", "large vocabulary", "uneven MLP"],
)
def test_plans_by_hand_compute_what_the_open_step_computes(model):
    plan = by_hand(model, 2)[-1]
    state, loss = model.open_step(model.state(), *model.batch())
    step = model.scheduled_step(plan.layers_per_stage, mpmd.ZeroBubble(2))
    with in_process_mesh(2) as mesh:
        of_hand = mpmd.jit(step, mesh)(model.state(), *model.microbatches(4))
        np.testing.assert_allclose(of_hand[1], loss, rtol=1e-5)
        for leaf, expected in zip(jax.tree.leaves(of_hand[0]), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-2, atol=1e-5)


def test_layers_are_cut_by_their_amounts():
    assert equal_layers(11, 2) == (6, 5) and equal_layers(6, 4) == (2, 2, 1, 1)
    assert balanced([1, 1, 1, 1, 4], 2) == (4, 1)
    assert balanced([3, 1, 1, 1, 2], 3) == (1, 2, 2)
    assert balanced(MODELS["large vocabulary"]().work(), 2) == (5, 1)


# The command.


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_benchmarks_of_devices_run_on_cpus(tmp_path):
    path = tmp_path / "results.json"
    arguments = ["--device", "--platform", "cpu", "--patience", "3"]
    command.main([*arguments, "--json", str(path), "--page", str(tmp_path / "page.md")])
    found = json.loads(path.read_text())["benchmarks"]
    failures = {name: outcome["failure"] for name, outcome in found.items() if outcome["failure"]}
    assert list(found) == list(command.DEVICE_LIMITS) and not failures
    assert len(found["conformance"]["tables"]["Programs on groups that share a device"]) >= 40
    peers = {row["peer"] for row in found["throughput"]["tables"]["Throughput"]}
    assert {"jax.jit, one device", "mpmd in process", "mpmd on Ray"} <= peers
