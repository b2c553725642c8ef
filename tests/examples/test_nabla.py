"""Nabla's examples: gradients, where everything is, and that neither can be wrong unnoticed."""

import re

import pytest

PUBLISHED_LOSS_OF_2D = 3828.785


@pytest.mark.usual("nabla_2d")
@pytest.mark.parametrize("name", ["nabla_gpipe", "nabla_2d"])
def test_gradients_are_those_of_jax(example, capsys, name):
    example(name).main([])
    printed = capsys.readouterr().out
    for gradient in "wbx":
        assert f"gradients of {gradient}: max |difference|" in printed
        assert f"gradients of {gradient}: largest relative error of a leaf" in printed
    loss = float(re.search(r"loss: (\S+) in the pipeline", printed)[1])
    if name == "nabla_2d":
        assert loss == pytest.approx(PUBLISHED_LOSS_OF_2D, rel=1e-6)
    replicas = 2 if name == "nabla_2d" else 1
    for line in (
        "args[0][3]['w']: float32(16, 16) on groups (3,), sharded ('model',): (16, 16) on each device",
        f"sharded (None, 'data'): ({8 // replicas}, {4 // replicas}, 16) on each device",
        "group 3 sends group 2 values",
        *(f"group {stage}: no all-reduce in fwd_{stage}" for stage in range(4)),
    ):
        assert line in printed
    assert printed.count("(group, replica)") == 6
    assert ("group 0: all-reduces of [(16,), (16, 16)]" in printed) == (replicas == 2)


@pytest.mark.slow
def test_weights_shared_by_devices(example, capsys):
    example("nabla_gpipe").main(["--model", "2"])
    assert "args[0][0]['w']: float32(16, 16) on groups (0,), sharded (None, 'model'): (16, 8)" in (
        capsys.readouterr().out
    )


def test_2d_fails_without_data_parallelism(example, monkeypatch):
    with pytest.raises(SystemExit, match="several replicas"):
        example("nabla_2d").main(["--data", "1"])
    axes = {"stage": 4, "data": 1, "model": 1}
    monkeypatch.setattr(example("common"), "mesh_axes", lambda *args: axes)
    with pytest.raises(AssertionError, match=r"args\[1\] is \(4, 4, 16\) on each device"):
        example("nabla_2d").main([])
