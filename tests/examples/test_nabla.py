"""Nabla's examples: gradients, where everything is, and that neither can be wrong unnoticed."""

import re

import pytest
from jax.sharding import PartitionSpec as P

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


CHECKS = ("check_inputs", "check_edges", "check_collectives")


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_2d_fails_by_each_check_if_every_replica_has_the_whole_batch(example, monkeypatch, check):
    monkeypatch.setattr(example("nabla_gpipe"), "BATCH_SPEC", P())
    for other in {*CHECKS} - {check}:
        monkeypatch.setattr(example("nabla_gpipe"), other, lambda *args: None)
    with pytest.raises(AssertionError):
        example("nabla_2d").main([])


@pytest.mark.slow
def test_2d_fails_if_a_forward_sums_over_replicas(example, monkeypatch):
    nabla = example("nabla_gpipe")
    stage = nabla.stage
    monkeypatch.setattr(nabla, "stage", lambda params, x: stage(params, x - x.mean(0)))
    with pytest.raises(AssertionError, match=r"group 0: forwards exchange \{'fwd_0'"):
        example("nabla_2d").main([])


def test_2d_fails_without_data_parallelism(example, monkeypatch):
    with pytest.raises(SystemExit, match="several replicas"):
        example("nabla_2d").main(["--data", "1"])
    axes = {"stage": 4, "data": 1, "model": 1}
    monkeypatch.setattr(example("common"), "mesh_axes", lambda *args: axes)
    with pytest.raises(AssertionError, match=r"args\[1\] is \(4, 4, 16\) on each device"):
        example("nabla_2d").main([])
