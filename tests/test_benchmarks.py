"""``python -m benchmarks``: options, tables and JSON, processes of benchmarks, and plans by hand."""

import argparse
import importlib.util
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import mpmd
from benchmarks import __main__ as command
from benchmarks.frame import Limited, Setup, in_process_mesh
from benchmarks.planned_models import by_hand, large_vocabulary, mlp, u_net
from benchmarks.report import Outcome, page

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


# Measurements, tables and JSON.


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
