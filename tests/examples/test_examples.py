"""Every example in one process, with small sizes: that it runs, and that it prints what it is for."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support.subprocesses import environment

ROOT = pathlib.Path(__file__).parents[2]


def run_example(name: str, *arguments: object, returncode: int = 0) -> str:
    """Runs ``python examples/name.py`` from the root, which is to end so; what it printed."""
    finished = subprocess.run(
        [sys.executable, f"examples/{name}.py", *map(str, arguments)],
        check=False,
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert finished.returncode == returncode, finished.stdout
    return finished.stdout


SMALL_GPT = [
    "--in-process",
    "--layers",
    "4",
    "--d-model",
    "16",
    "--heads",
    "2",
    "--seq-len",
    "16",
    "--batch-size",
    "8",
    "--steps",
    "6",
]


UNEVEN = ["--layers", 5, "--stages", 4, "--groups", 2, "--schedule", "Interleaved1F1B"]


FOUR_DEVICES = ["--stages", 2, "--data", 2, "--model", 2, "--batch-size", 16]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(FOUR_DEVICES, id="Std1F1B"),
        pytest.param(UNEVEN, id="Interleaved1F1B", marks=pytest.mark.slow),
    ],
)
def test_train_gpt(arguments, tmp_path):
    printed = run_example("train_gpt", *SMALL_GPT, *arguments, "--output", tmp_path)

    losses = re.findall(r"^ +\d  +(\S+)  +(\S+)  +\S+$", printed, re.MULTILINE)
    assert len(losses) == 3
    for plain, pipelined in losses:
        assert float(pipelined) == pytest.approx(float(plain), abs=2e-5)
    validation_loss = float(re.search(r"validation loss: (\S+) nats/byte", printed)[1])
    assert 4 < validation_loss < 6
    for picture in ("loss.png", "timeline.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    names = {event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]}
    assert {"fwd_0__0", "bwd_0__0"} <= names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", 9, "--microbatches", 2], "9 sequences do not divide into 2 microbatches"),
        (["--stages", 5], "4 layers cannot fill 5 stages"),
        (["--heads", 3], "d_model 16 is not a multiple of 3 heads"),
        (["--stages", 4, "--groups", 2], "Std1F1B puts one stage on a group: --groups must be 4"),
        (["--steps", 0], "--steps must be at least 1"),
        (["--data", 2], "microbatches of 1 sequences do not divide over --data 2"),
        (["--model", 4], "2 heads do not divide over --model 4"),
        (["--model", 0], "--model must be at least 1"),
        (["--data", 2, "--processes", 3], "the 2 devices of a group do not divide over --processes 3"),
        (["--model", 2, "--processes", 2], "--processes is for groups on Ray"),
    ],
)
def test_train_gpt_refuses_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_gpt

    with pytest.raises(SystemExit, match="2"):
        train_gpt.parse_arguments([*SMALL_GPT, *map(str, arguments)])
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")


def test_scanned_gpt():
    sizes = (
        "--stages 2 --layers 3 --d-model 8 --heads 2 --seq-len 8 --batch-size 4 --microbatches 2 --steps 2"
    )
    printed = run_example("scanned_gpt", *sizes.split())
    for kind in ("written out", "scanned"):
        for result in ("losses", "parameters"):
            assert f"{kind}: {result}: max |difference|" in printed
    assert "[0:2] on (0,), [2:3] on (1,)" in printed


def test_workshop_transformer():
    sizes = "--layers 2 --hidden 16 --heads 2 --seq-len 8 --microbatches 2 --steps 2".split()
    printed = run_example("workshop_transformer", *sizes)
    for strategy in (
        "tensor parallel",
        "gathered",
        "sequence parallel",
        "full checkpointing",
        "selective checkpointing",
    ):
        for result in ("losses", "parameters and moments"):
            assert f"{strategy}: {result}: max |difference|" in printed


def test_workshop_strategies(tmp_path):
    sizes = "--layers 3 --d-model 16 --seq-len 16 --heads 2 --simulate 2".split()
    strategies = ["pipeline, 1F1B", "selected"]
    printed = run_example("workshop_strategies", *sizes, "--strategies", *strategies, "--output", tmp_path)
    for strategy in strategies:
        assert f"{strategy}: parameters and moments: max |difference|" in printed
    for answer in ("group 0 sends group 1", "in which a group computes: group 0", "during", "step.svg"):
        assert answer in printed
    table = printed.split("residuals  chosen\n")[1].splitlines()
    seconds = {
        name: float(line.removeprefix(name).split()[0])
        for line in table
        for name in strategies
        if line.startswith(name)
    }
    assert seconds["selected"] == min(seconds.values()) and next(iter(seconds)) == "selected"
    assert (tmp_path / "step.svg").stat().st_size and json.loads((tmp_path / "step.json").read_text())


@pytest.mark.parametrize(
    "command",
    [
        "alpa_tutorial --given --dim 8 --batch-size 32 --simulate 1 --parts devices --transport object_store",
        pytest.param(
            "workshop_strategies --strategies 3D --layers 2 --d-model 16 --seq-len 8", marks=pytest.mark.slow
        ),
        pytest.param(
            "workshop_transformer --strategies gathered --layers 2 --hidden 8 --heads 2 --seq-len 4 "
            "--batch-size 2 --microbatches 2 --data 1 --steps 1",
            marks=pytest.mark.slow,
        ),
        pytest.param("nabla_2d --processes 2 --transport network", marks=pytest.mark.slow),
        pytest.param(
            "jaxpp_tutorial --layers 4 --seq-len 4 --heads 4 --d-model 32 --steps 4", marks=pytest.mark.slow
        ),
    ],
)
def test_on_ray(command):
    printed = run_example(*command.split(), "--ray")
    transport = command.partition("--transport ")[2] or "shared_memory"
    assert f"between groups arrays are moved by {transport}\n" in printed
    assert "max |difference|" in printed or "largest relative error" in printed
