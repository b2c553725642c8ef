"""Every example in one process, with small sizes: that it runs, and that it prints what it is for."""

import json
import math
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support.subprocesses import environment

ROOT = pathlib.Path(__file__).parents[2]


def run_example(words: str, *arguments: object, returncode: int = 0, **variables: str) -> str:
    """Runs an example, such as ``grpo --steps 2``, asserts how it ends, and returns its output."""
    name, *options = words.split()
    finished = subprocess.run(
        [sys.executable, f"examples/{name}.py", *options, *map(str, arguments)],
        check=False,
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT), **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert finished.returncode == returncode, finished.stdout
    return finished.stdout


SMALL_GPT = "--in-process --layers 4 --d-model 16 --heads 2 --seq-len 16 --batch-size 8 --steps 6"
UNEVEN = "--layers 5 --stages 4 --groups 2 --schedule Interleaved1F1B"
FOUR_DEVICES = "--stages 2 --data 2 --model 2 --batch-size 16"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [FOUR_DEVICES, UNEVEN], ids=["Std1F1B", "Interleaved1F1B"])
def test_train_gpt(arguments, tmp_path):
    printed = run_example(f"train_gpt {SMALL_GPT} {arguments} --output {tmp_path}")

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
        ("--batch-size 9 --microbatches 2", "9 sequences do not divide into 2 microbatches"),
        ("--stages 5", "4 layers cannot fill 5 stages"),
        ("--heads 3", "d_model 16 is not a multiple of 3 heads"),
        ("--stages 4 --groups 2", "Std1F1B puts one stage on a group: --groups must be 4"),
        ("--steps 0", "--steps must be at least 1"),
        ("--data 2", "microbatches of 1 sequences do not divide over --data 2"),
        ("--model 4", "2 heads do not divide over --model 4"),
        ("--model 0", "--model must be at least 1"),
        ("--data 2 --processes 3", "the 2 devices of a group do not divide over --processes 3"),
        ("--model 2 --processes 2", "--processes is for groups on Ray"),
    ],
)
def test_train_gpt_refuses_in_one_line(example, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        example("train_gpt").parse_arguments(f"{SMALL_GPT} {arguments}".split())
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")


@pytest.mark.slow
def test_scanned_gpt():
    sizes = (
        "--stages 2 --layers 3 --d-model 8 --heads 2 --seq-len 8 --batch-size 4 --microbatches 2 --steps 2"
    )
    printed = run_example(f"scanned_gpt {sizes}")
    for kind in ("written out", "scanned"):
        for result in ("losses", "parameters and moments"):
            assert f"{kind}: {result}: largest relative error of a leaf" in printed
    assert "[0:2] on (0,), [2:3] on (1,)" in printed


LONG_CONTEXT = (
    "--stages 2 --slices 2 --layers 2 --d-model 8 --heads 2 --seq-len 16 --microbatches 2 --steps 2"
)


@pytest.mark.slow
def test_long_context_gpt():
    printed = run_example(f"long_context_gpt {LONG_CONTEXT}")
    assert "slices of 9, 7 bytes\n" in printed
    for schedule in ("Std1F1B", "Seq1F1B"):
        for result in ("losses", "parameters and moments"):
            assert f"{schedule}: {result}: largest relative error of a leaf" in printed
    bubbles = [
        float(share) for share in re.findall(r"^bubble ([\d.]+)% in the simulator", printed, re.MULTILINE)
    ]
    assert bubbles == [33.3, 20.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--stages 1",
            "--stages must be at least 2: slices wait for one another, so one group saves nothing",
        ),
        ("--stages 3", "2 layers cannot fill 3 stages"),
        ("--slices 0", "--slices must be at least 1"),
        ("--slices 17", "16 tokens cannot be cut into 17 slices: each slice needs a token at least"),
        ("--heads 3", "d_model 8 is not a multiple of 3 heads"),
    ],
)
def test_long_context_gpt_refuses_in_one_line(example, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        example("long_context_gpt").parse_arguments(f"{LONG_CONTEXT} {arguments}".split())
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")


@pytest.mark.slow
def test_long_context_gpt_names_the_devices_that_are_missing():
    printed = run_example(f"long_context_gpt {LONG_CONTEXT}", returncode=1, JAX_NUM_CPU_DEVICES="1")
    assert printed.splitlines()[-1] == "{'stage': 2} needs 2 devices; JAX has 1"


@pytest.mark.slow
def test_workshop_transformer():
    sizes = "--layers 2 --hidden 16 --heads 2 --seq-len 8 --microbatches 2 --steps 2"
    printed = run_example(f"workshop_transformer {sizes}")
    for strategy in (
        "tensor parallel",
        "gathered",
        "sequence parallel",
        "full checkpointing",
        "checkpoints every 2 layers",
        "checkpointed blocks",
        "checkpointed attention",
        "selective checkpointing",
    ):
        for result in ("losses", "parameters and moments"):
            assert f"{strategy}: {result}: largest relative error of a leaf" in printed


SMALL_STRATEGIES = "workshop_strategies --layers 3 --d-model 16 --seq-len 16 --heads 2 --simulate 1"


@pytest.mark.slow
def test_workshop_strategies(tmp_path):
    printed = run_example(f"{SMALL_STRATEGIES} --strategies data --troubleshoot data --output {tmp_path}")
    assert "data: parameters and moments: largest relative error of a leaf" in printed
    assert re.search(r"between devices of a group: all-reduce \d+%; predicted \d", printed)
    for answer in ("group 0 computes", "stage 0: ", "during", "step.svg"):
        assert answer in printed
    assert (tmp_path / "step.svg").stat().st_size and json.loads((tmp_path / "step.json").read_text())
    assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1


@pytest.mark.slow
def test_workshop_strategies_selected():
    strategies = ["pipeline, 1F1B", "selected"]
    # In a smaller step XLA's temporaries, which no plan knows before, need more than the values.
    printed = run_example(f"{SMALL_STRATEGIES} --seq-len 64 --strategies", *strategies)
    for strategy in [*strategies, "selected, less memory"]:
        assert f"{strategy}: parameters and moments: largest relative error of a leaf" in printed
    assert "what is selected for less memory needs less: selected, less memory / selected = 0." in printed
    assert "group 0 sends group 1" in printed and "between devices of a group: none;" in printed
    table = printed.split("residuals  chosen\n")[1].splitlines()
    seconds = [float(re.search(r"([\d.]+) ms", line)[1]) for line in table[:3]]
    assert seconds == sorted(seconds) and table[2].startswith("pipeline, 1F1B")


@pytest.mark.slow
def test_what_workshop_claims_of_memory():
    """With sequences that long, activations outweigh weights."""
    strategies = ["pipeline, GPipe", "pipeline, 1F1B", "full checkpointing"]
    printed = run_example(f"{SMALL_STRATEGIES} --seq-len 64 --heads 8 --strategies", *strategies)
    for names in ("pipeline, 1F1B / pipeline, GPipe", "full checkpointing / pipeline, 1F1B"):
        assert f": {names} = 0." in printed


@pytest.mark.slow
def test_workshop_strategies_measured():
    """Times are printed and compared; how they compare depends on the machine, so any will do."""
    options = "--measure 1 --noise 1e6 --strategies data"
    printed = run_example(f"{SMALL_STRATEGIES} {options}", "2 stages")
    table = printed.split("collectives (predicted)\n")[1]
    for name in ("data", "2 stages", "imbalanced", "rebalanced"):
        line = re.search(rf"^{name} .*$", table, re.MULTILINE)[0]
        assert ("all-reduce" in line) == (name == "data"), line
    assert printed.count(": rebalanced / imbalanced = ") == 2


@pytest.mark.slow
def test_workshop_models():
    printed = run_example("workshop_models --cases network")
    assert "Output shape: (32, 10)" in printed and "outputs: largest relative error" in printed


@pytest.mark.slow
def test_a_plan_for_175_billion_weights():
    printed = run_example("workshop_models --cases 175B")
    assert re.search(r"data parallel: data 64, [^:]* does not fit: needs", " ".join(printed.split()))
    sizes = [
        int(re.search(rf"{kind} parallel: (\d+)", printed)[1]) for kind in ("Data", "Tensor", "Pipeline")
    ]
    assert math.prod(sizes) <= 64 and sizes[2] > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "alpa_tutorial --given --dim 8 --batch-size 32 --simulate 1 --parts devices --transport object_store",
        "workshop_strategies --strategies 3D --layers 2 --d-model 16 --seq-len 8",
        "workshop_transformer --strategies gathered --layers 2 --hidden 32 --heads 2 --seq-len 8 "
        "--batch-size 8 --microbatches 2 --data 1 --steps 1",
        f"long_context_gpt {LONG_CONTEXT}",
        "nabla_2d --processes 2 --transport network",
        "jaxpp_tutorial --layers 4 --seq-len 4 --heads 4 --d-model 32 --steps 4",
    ],
)
def test_on_ray(command):
    printed = run_example(f"{command} --ray")
    transport = command.partition("--transport ")[2] or "shared_memory"
    assert f"between groups arrays are moved by {transport}\n" in printed
    assert "max |difference|" in printed or "largest relative error" in printed
