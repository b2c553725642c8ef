"""Which nodes and devices of a Ray cluster a plan is for."""

import importlib

import pytest

from cluster.describe import _find, _holding, describe
from mpmd.memory import Holding

GIB = 2**30


@pytest.fixture
def nodes(monkeypatch):
    """Has the cluster consist of nodes with these resources."""

    def have(*resources):
        module = importlib.import_module("cluster.describe")  # as an attribute that name is the function
        monkeypatch.setattr(module, "live_nodes", lambda: [{"Resources": of_node} for of_node in resources])

    return have


def test_a_device_of_a_cpu_node_is_a_cpu_with_its_share(nodes):
    nodes({"CPU": 4.0, "memory": 8.0 * GIB}, {"CPU": 4.0, "memory": 6.0 * GIB})
    nodes = _find("cpu", None, {})
    assert (nodes.count, nodes.devices_per_node, nodes.cpus, nodes.memory) == (2, 4, 1.0, 1.5 * GIB)
    nodes = _find("cpu", None, {"nodes": 1, "devices_per_node": 8})
    assert (nodes.count, nodes.devices_per_node, nodes.cpus, nodes.memory) == (1, 8, 0.5, GIB)
    assert _find("cpu", 2.0, {}).devices_per_node == 2


def test_nodes_without_gpus_are_left_out(nodes):
    nodes({"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0})
    nodes = _find("cuda", None, {})
    assert (nodes.count, nodes.devices_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("platform", "given", "says"),
    [
        ("cuda", {}, "say which devices_per_node"),
        ("cuda", {"devices_per_node": 8}, "no node has 8 devices of 'cuda'"),
        ("cuda", {"devices_per_node": 2, "nodes": 3}, "3 nodes are asked for, and 2 have"),
        ("tpu", {}, "no node has any devices of 'tpu'"),
    ],
)
def test_what_the_cluster_does_not_have_is_said_with_what_it_has(nodes, platform, given, says):
    nodes({"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 4.0})
    with pytest.raises(ValueError, match=says) as error:
        _find(platform, None, given)
    assert "4 CPU, 2 GPU" in str(error.value)


def test_nodes_of_several_kinds_are_described_one_kind_at_a_time(nodes):
    some, others = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:A100": 1.0}, {"CPU": 8.0, "GPU": 8.0}
    nodes(some, some, {**others, "accelerator_type:H100": 1.0})
    with pytest.raises(
        ValueError, match=r"kinds A100, H100: say which kind=.*from_ray\(kind='H100', ...\)\]"
    ):
        _find("cuda", None, {})
    assert (_find("cuda", None, {"kind": "A100"}).count, _find("cuda", None, {"kind": "H100"}).count) == (
        2,
        1,
    )
    assert _find("cuda", None, {"kind": "H100"}).devices_per_node == 8
    with pytest.raises(ValueError, match=r"no node has any devices .* of the kind 'B200', .* none"):
        _find("cuda", None, {"kind": "B200"})


def test_messages_wait_where_the_transport_of_the_platform_has_them():
    assert _holding("cpu", 1) is Holding.SLOTS
    assert _holding("cpu", 2) is Holding.KEPT
    assert _holding("cuda", 1) is Holding.ELSEWHERE


def test_measuring_takes_a_function_that_runs_steps():
    with pytest.raises(ValueError, match=r"record_steps, which mpmd.Cluster.from_ray\(measure=True\) gives"):
        describe(measure=True)
