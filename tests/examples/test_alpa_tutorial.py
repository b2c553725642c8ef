"""Alpa's tutorial: each of its parts, and what it prints of what was chosen."""

import re

import pytest

SMALL = "--given --dim 16 --batch-size 64 --simulate 6".split()


@pytest.mark.slow
def test_every_part(example, capsys):
    example("alpa_tutorial").main(SMALL)
    printed = capsys.readouterr().out
    for name in ("params", "opt_state"):
        assert printed.count(f"{name}: largest relative error of a leaf") >= 3
    devices, automatic, gpus = (printed.split(f"# {part}\n")[1] for part in PARTS)
    assert "0: data 2" in devices
    assert "one device" in automatic and "stage 1: layers [1]" in automatic
    assert "2 nodes of 4 devices" in gpus and "tensor parallel: model " in gpus
    for measured, predicted, ratio in re.findall(
        r"([\d.]+) ms for a step here, ([\d.]+) ms predicted: predicted / measured = ([\d.]+)", automatic
    ):
        assert float(measured) > 0 and float(predicted) > 0 and float(ratio) > 0
    assert automatic.count("predicted / measured") >= 1
    table = gpus.split("layers  mesh")[1]
    assert re.search(r"^0 +1x4 +1 +1 +4 +[\d.]+ .s +[\d.]+ .s", table, re.MULTILINE)
    assert table.count("stage 0: layers") == 1 and " stage 0\n" in table


PARTS = ("manual stages with devices for each", "automatic layers and stages", "two nodes of four GPUs")


@pytest.mark.slow
def test_as_many_layers_as_asked_for(example, capsys):
    example("alpa_tutorial").main("--parts gpus --num-layers 1 --simulate 1".split())
    printed = capsys.readouterr().out
    assert "stage 0: layers [0]," in printed and "stage 1: " not in printed


def test_the_tutorials_sizes(example):
    args = example("alpa_tutorial").parse_arguments(["--full"])
    assert (args.dim, args.batch_size) == (2048, 2048)
