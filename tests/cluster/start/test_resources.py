"""Requests of groups from the cluster, and messages when it has too little."""

from types import SimpleNamespace

import pytest
import ray

from cluster.start import processes, resources
from cluster.start.processes import bundles_of
from cluster.start.resources import assign_bundles, describe_shortage, fitting_cpus
from cluster.start.shapes import LaunchRequest
from mpmd.ir.reshard import GroupShape


@pytest.mark.parametrize(
    ("nodes", "num_groups", "cpus"),
    [
        ([16, 16], 4, 1),
        ([2], 4, 0.5),
        ([1], 3, 0.3333),
        ([0, 4], 8, 0.5),
        ([0.5], 1, 0.5),
        ([0], 2, 1),
    ],
)
def test_groups_request_one_cpu_or_a_fraction_that_fits(nodes, num_groups, cpus):
    assert fitting_cpus(nodes, num_groups) == cpus


def test_a_shortage_by_fragmentation_alone_shows_the_nodes():
    nodes = [{"Resources": {"CPU": 3.0}}, {"Resources": {"CPU": 3.0}}]
    assert describe_shortage([{"CPU": 2}] * 3, {"CPU": 6.0}, nodes).splitlines() == [
        "3 processes of 2 CPU each, every one on one node:",
        "  CPU: 6 asked, 6 available of 6",
        "  nodes: 3 CPU; 3 CPU",
    ]


def test_a_shortage_says_that_no_node_is_large_enough():
    nodes = [{"Resources": {"CPU": 8.0, "GPU": 4.0}}, {"Resources": {"CPU": 8.0}}]
    lines = describe_shortage([{"CPU": 1, "GPU": 8}], {"CPU": 16, "GPU": 4}, nodes).splitlines()
    assert "  no node has 8 GPU: ask for less, or have more processes_per_group" in lines


def test_a_shortage_names_each_kind_of_process():
    bundles = [{"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 2}, {"CPU": 1, "GPU": 2}]
    lines = describe_shortage(
        bundles, {"CPU": 8, "GPU": 4}, [{"Resources": {"CPU": 8, "GPU": 4}}]
    ).splitlines()
    assert (
        lines[0] == "1 process of 1 CPU, 4 GPU each; 2 processes of 1 CPU, 2 GPU each, every one on one node:"
    )
    assert lines[2] == "  GPU: 8 asked, 4 available of 4, 4 missing"


def test_the_processes_of_a_group_are_on_one_node_where_that_can_be():
    bundles = [{"CPU": 1}] * 6
    nodes = ["a", "b", "a", "b", "b", "a"]
    indices = assign_bundles(nodes, bundles, [2] * 6)
    placed = [nodes[index] for index in indices]
    assert sorted(indices) == list(range(6))
    assert [placed[i] == placed[i + 1] for i in (0, 2, 4)] == [True, True, False]


def test_processes_get_bundles_of_their_own_kind():
    bundles = [{"CPU": 1}, {"CPU": 2}, {"CPU": 2}, {"CPU": 1}]
    assert assign_bundles(["a", "a", "b", "b"], bundles, [1, 2, 2, 1]) == [0, 1, 2, 3]


HELD = {"name": "mpmd 01 a", "state": "CREATED", "bundles": {0: {"CPU": 1.0}, 1: {"CPU": 1.0}}}
NODES = [{"Resources": {"CPU": 4.0}}]


@pytest.mark.parametrize(
    ("asked", "groups", "holds"),
    [
        (3, [HELD], "2 CPU"),
        (2, [HELD], None),  # fits: what a closed mesh held may not be free yet
        (5, [HELD], None),  # would not fit without the mesh either
        (3, [{**HELD, "state": "REMOVED"}], None),
        (3, [{**HELD, "name": "mpmd 02 a"}], None),  # of another program
        (2, [HELD, {**HELD, "name": ""}], "2 CPU"),
        (3, [HELD, {**HELD, "name": ""}], None),
    ],
)
def test_meshes_of_the_same_program_that_are_in_the_way_are_named(monkeypatch, asked, groups, holds):
    monkeypatch.setattr(resources, "_names_of_this_program", lambda: "mpmd 01 ")
    advice = resources.held_by_this_program([{"CPU": 1.0}] * asked, NODES, groups)
    assert bool(advice) == bool(holds)
    assert holds is None or f"not closed hold {holds}: close them first" in advice


def test_two_drivers_may_give_back_what_a_dead_one_has_left_behind(monkeypatch):
    table = {**HELD, "name": "mpmd 01 dead worker 0"}
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01"))
    monkeypatch.setattr(resources, "placement_group_table", lambda: {0: table})
    monkeypatch.setattr(resources, "actor_is_dead", lambda actor: True)
    monkeypatch.setattr(resources, "get_placement_group", [].index)  # raises ValueError: the other was faster
    resources.remove_left_behind()


SMALL_CLUSTER = [{"Resources": {"CPU": 2.0, "memory": 2.0 * 2**30}}]
REQUEST = LaunchRequest({"stage": 4}, "stage", None)


@pytest.mark.parametrize(
    ("nodes", "num_groups", "num_spares", "message"),
    [
        (SMALL_CLUSTER, 21, 0, "21 processes are needed, and the 1 node .* 2.0 GiB of memory: room for 20"),
        (SMALL_CLUSTER, 20, 1, "21 processes are needed, 1 of them spares, and the 1 node"),
        (
            SMALL_CLUSTER,
            2,
            10**30,
            r"more than 10\*\*18 processes are needed, .* can have 40000",
        ),
        ([], 2, 10**9, "1000000002 processes are needed, 1000000000 of them spares"),
    ],
)
def test_more_processes_than_the_cluster_can_hold(monkeypatch, nodes, num_groups, num_spares, message):
    monkeypatch.setattr(processes, "live_nodes", lambda: nodes)
    shapes = [GroupShape({"stage": 1})] * num_groups
    with pytest.raises(ValueError, match=message):
        bundles_of(REQUEST, "cpu", shapes, num_spares)


@pytest.mark.parametrize(
    ("request_", "platform", "nodes"),
    [
        (REQUEST, "cpu", SMALL_CLUSTER[:0]),
        (REQUEST, "cuda", SMALL_CLUSTER),
        (REQUEST._replace(cpus_per_group=1), "cpu", SMALL_CLUSTER),
    ],
    ids=["no node yet", "GPUs", "CPUs of their own"],
)
def test_a_cluster_that_may_grow_is_waited_for(monkeypatch, request_, platform, nodes):
    monkeypatch.setattr(processes, "live_nodes", lambda: nodes)
    assert len(bundles_of(request_, platform, [GroupShape({"stage": 1})] * 30, 0)) == 30


def test_groups_ask_for_nodes_of_their_accelerator_type(monkeypatch):
    monkeypatch.setattr(processes, "live_nodes", lambda: SMALL_CLUSTER)
    shapes = [GroupShape({"stage": 2}, 2), GroupShape({"stage": 2})]
    request = LaunchRequest(None, None, [{"stage": 2}] * 2, accelerator_types=["H100", "A100"])
    *first, second = bundles_of(request, "cuda", shapes, 0)
    assert [{**bundle, "CPU": 0} for bundle in first] == [
        {"CPU": 0, "GPU": 1, "accelerator_type:H100": 0.001}
    ] * 2
    assert {**second, "CPU": 0} == {"CPU": 0, "GPU": 2, "accelerator_type:A100": 0.001}
    same = bundles_of(request._replace(accelerator_types="H100"), "cuda", shapes, 1)
    assert all("accelerator_type:H100" in bundle for bundle in same) and len(same) == 4
    assert "accelerator_type:H100" not in bundles_of(REQUEST, "cpu", [GroupShape({"stage": 1})] * 4, 0)[0]
