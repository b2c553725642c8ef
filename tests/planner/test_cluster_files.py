"""Files and presets of clusters."""

import json

import numpy as np
import pytest

import mpmd
from mpmd.planner.cluster import Cluster
from mpmd.planner.cluster_file import cluster_data
from mpmd.planner.curves import Curve, ProductWork
from mpmd.planner.hardware import seconds_by_part
from mpmd.simulate import Link


def test_a_cluster_is_read_as_it_was_written(tmp_path):
    """With numbers of NumPy, infinite memory and a link without a limit."""
    of_numpy = {"nodes": np.int64(2), "flops": np.float32(2**40), "memory": float("inf")}
    rates = {"product bfloat16": Curve(np.float32(2**40), np.int64(3)), "all_reduce 8": Curve(2e11, 3e5)}
    link = Link(np.float64(1e-6), float("inf"))
    cluster = Cluster.preset("h100", **of_numpy, rates=rates, device_link=link)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 6}, "has version 6 of a cluster, and this is version 5"),
        ({"speed": 1}, "it has speed; it may have nodes, devices_per_node, "),
        ({"alone_of": {"memory": 1.5}}, "alone_of is gone: leave it out"),
        ({"flops": "1e12"}, r"cluster\.json: flops: expected a number, not '1e12'"),
        ({"flops": -1}, "flops must be a number of operations per second above 0, not -1"),
        ({"rates": {"product bfloat16": 3.0}}, r"rates\['product bfloat16'\]: expected an object, not 3.0"),
        ({"rates": {"sum bfloat16": {"rate": 3.0}}}, "'sum bfloat16' is none of product,"),
        ({"rates": {"all_reduce 1": {"rate": 3.0}}}, "'all_reduce 1' is none of"),
        ({"rates": {"all_gather 08": {"rate": 3.0}}}, "'all_gather 08' is none of"),
        (
            {"rates": {"all_gather 8": {"rate": 0.0}}},
            "must be a finite number of bytes per second",
        ),
        ({"rates": {"product bfloat16": {"rate": 0.0}}}, r"rates\['product bfloat16'\].rate must be"),
        ({"device_link": [1, 2]}, r"device_link: expected an object, not \[1, 2\]"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, change, text):
    path = tmp_path / "cluster.json"
    Cluster.preset("h100").save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ValueError, TypeError), match=text):
        Cluster.load(path)


def test_an_unknown_preset_is_named():
    with pytest.raises(ValueError, match=r"name must be one of 'a100-80gb', 'a100-40gb', .* not 'b100'"):
        Cluster.preset("b100")


@pytest.mark.parametrize(("name", "chips"), [("v5e", 256), ("v5p", 64), ("v6e", 256)])
def test_a_node_of_tpus_is_a_slice(name, chips):
    cluster = Cluster.preset(name, nodes=2)
    assert cluster.num_devices == 2 * chips
    assert Cluster.preset(name, devices_per_node=8).devices_per_node == 8
    assert cluster.kernel_floor == 0, "a program of TPUs starts no kernels"


def test_products_of_gpus_have_rates_by_dtype():
    def seconds(name, kind):
        cluster = Cluster.preset(name)
        return seconds_by_part(cluster, 1e15, 0.0, 0.0, {f"product {kind}": ProductWork(1e15, 1.0)})[0]

    for name in ("a100-80gb", "h100", "h200", "l40s"):
        assert seconds(name, "float32") == pytest.approx(2 * seconds(name, "bfloat16"), rel=0.01)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        assert seconds("h100", dtype) == pytest.approx(seconds("h100", "bfloat16") / 2, rel=0.01)
        assert seconds("a100-80gb", dtype) == pytest.approx(seconds("a100-80gb", "bfloat16"), rel=0.01)


@pytest.mark.parametrize(
    "content",
    ["[1]" * 10**6, "[" + "1, " * 10**6 + "1]", '{"%s": 1}' % ("x" * 10**6), "[" * 500 + "]" * 500],
)
def test_the_message_of_a_wrong_file_is_short(content, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"cluster\.json") as caught:
        Cluster.load(path)
    assert len(str(caught.value)) <= 2_000


def test_a_file_may_have_a_former_field_that_says_nothing(tmp_path):
    cluster = Cluster.preset("h100")
    data = cluster_data(cluster) | {"alone_of": {}}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"version": 5, **data}))
    assert Cluster.load(path) == cluster
    path.write_text(json.dumps({"version": 5, "pools": [data | {"kind": "H100"}]}))
    assert Cluster.load(path).pools[0].flops == cluster.flops
    with pytest.raises(TypeError, match="alone_of is gone: leave it out"):
        Cluster(**vars(cluster), alone_of={})
    with pytest.raises(ValueError, match="alone_of is gone: leave it out"):
        Cluster.preset("h100", alone_of={})
    with pytest.raises(TypeError, match="loads is gone: leave it out"):
        mpmd.simulate.Costs(loads=(1.0, 2.0))
