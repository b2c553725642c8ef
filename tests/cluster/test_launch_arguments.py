"""Meshes that ``launch`` is asked for: what it refuses before it connects, and what groups get."""

import socket

import pytest
import ray
from jax.sharding import AxisType

import cluster
from cluster.mesh import abstract_submesh
from cluster.protocol.process_info import Location
from cluster.protocol.versions import Versions
from cluster.start.connect import open_groups
from cluster.start.shapes import LaunchRequest, axis_types_of, fewest_processes, shapes_of, submeshes_of
from tests.support.processes import endpoints


@pytest.mark.parametrize(
    ("shape", "axis", "error", "message"),
    [
        ({"stage": 2}, "stages", ValueError, "no axis mpmd_axis='stages'; its axes are stage"),
        ({}, "stage", ValueError, "no axis mpmd_axis='stage'"),
        ({"stage": 2, "fsdp": -1}, "stage", ValueError, "'fsdp'. must be a whole number .* not -1"),
        ({"stage": 2, "fsdp": 1.5}, "stage", TypeError, "'fsdp'. must be a whole number .* not 1.5"),
        ({"stage": True}, "stage", TypeError, "must be a whole number of at least 1, not True"),
        (
            {"stage": 10**30},
            "stage",
            ValueError,
            r"more than 10\*\*18 groups, .* 40000 processes that a Ray",
        ),
        (
            {"stage": 2, "data": 10**12},
            "stage",
            ValueError,
            "2000000000000 devices are more than a mesh can have",
        ),
    ],
)
def test_shapes_that_are_no_mesh(shape, axis, error, message):
    with pytest.raises(error, match=message):
        cluster.launch(shape, axis)


def test_steps_see_axes_of_the_types_asked_for():
    request = LaunchRequest(
        {"stage": 2, "data": 4, "model": 2}, "stage", None, axis_types={"data": AxisType.Explicit}
    )
    assert axis_types_of(request) == {"data": AxisType.Explicit}
    (submesh, _) = (abstract_submesh(axes, axis_types_of(request)) for axes in submeshes_of(request))
    assert submesh.axis_types == (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    everywhere = request._replace(axis_types=AxisType.Explicit)
    assert axis_types_of(everywhere) == dict.fromkeys(("stage", "data", "model"), AxisType.Explicit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs mesh_shape and mpmd_axis, or groups"),
        ({"groups": []}, "groups is empty"),
        ({"groups": [{"data": 2}], "mpmd_axis": "stage"}, "and not both"),
        (
            {"groups": [{"data": 0}, {"model": -2}]},
            r"groups\[0\]\['data'\] must be .* not 0\ngroups\[1\]\['model'\] .* not -2",
        ),
        ({"groups": [{"data": 4}, {"data": 3}], "processes_per_group": 2}, "the 3 devices of group 1 do not"),
        ({"groups": [{"data": 4}], "processes_per_group": [2, 2]}, "has 2 numbers, but there are 1 groups"),
        (
            {"groups": [{"data": 4}], "processes_per_group": 3, "cpus_per_group": 0, "gpus_per_group": 1.5},
            "cpus_per_group must be a finite .* not 0\ngpus_per_group must be whole .* 1.5\nthe 4 devices",
        ),
        ({"groups": [{"data": 2}, {"data": 10**30}]}, "devices are more than a mesh can have"),
        ({"groups": [{"data": 4}], "platform": "cuda,cpu"}, "platform must be one platform .* 'cuda,cpu'"),
        (
            {"groups": [{"data": 4}], "accelerator_types": ["A100", ""]},
            "accelerator_types has 2 names, but there are 1 groups\naccelerator_types must be names",
        ),
        (
            {
                "groups": [{"data": 1}, {"data": 1}],
                "accelerator_types": ["A100", "H100"],
                "recovery": cluster.Recovery(spares=1),
            },
            "recovery has 1 spares, .* groups are on A100 and H100: leave the spares out",
        ),
    ],
    ids=str,
)
def test_groups_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        cluster.launch(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"processes_per_group": True},
            "processes_per_group must be a whole number, or a sequence .* not True",
        ),
        ({"processes_per_group": [2, 2.0]}, r"processes_per_group\[1\] must be a whole number, not 2.0"),
        (
            {"axis_types": {"stage": "explicit"}},
            "axis_types must be of jax.sharding.AxisType, .* not 'explicit'",
        ),
        ({"accelerator_types": 8}, "accelerator_types must be the name of an accelerator type, .* not 8"),
        ({"accelerator_types": ["A100", 8]}, r"accelerator_types\[1\] must be a str, not 8"),
        ({"groups": {"data": 2}}, "groups must be a sequence with the axes of each group"),
        ({"groups": [{"data": 2}, 2]}, r"groups\[1\] must be a dict of axis names and sizes.* not 2"),
    ],
    ids=str,
)
def test_values_of_wrong_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        cluster.launch(**({"mesh_shape": {"stage": 2}, "mpmd_axis": "stage"} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"axis_types": {"data": AxisType.Explicit}},
            "axis_types names the axis 'data'; the axes of groups are",
        ),
        ({"axis_types": AxisType.Manual}, "axis_types must be Auto or Explicit"),
        ({"step_timeout": 0}, "step_timeout must be a number of seconds above 0, or None, not 0"),
    ],
    ids=str,
)
def test_values_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        cluster.launch({"stage": 2}, "stage", **arguments)


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        ([8, 8], [8, 4, 4], [1, 2]),
        ([8, 8], [4, 4, 4, 4], [2, 2]),
        ([8, 8], [8, 4, 2, 1, 1], [1, 8]),
        ([8, 8], [8, 4], [1, 1]),  # too few: what they would need on more nodes of eight
        ([4], [0, 0], [1]),
        ([0, 0.5], [8], [1, 1]),
    ],
)
def test_groups_get_as_few_processes_as_the_gpus_of_nodes_allow(gpus, nodes, expected):
    assert fewest_processes([max(1, round(n)) for n in gpus], gpus, nodes) == expected


def test_gpus_that_are_asked_for_divide_over_the_processes():
    request = LaunchRequest(None, None, [{"data": 6}], gpus_per_group=8)
    (shape,) = shapes_of(request, "cuda", [4, 4])
    assert shape.num_processes == 2
    with pytest.raises(ValueError, match="gives each of the 1 processes of group 0 4 GPUs for 6 devices"):
        shapes_of(request._replace(gpus_per_group=4), "cuda", [4, 4])


def test_processes_with_other_versions_than_the_driver_are_named():
    driver = Versions("0.10.2", "0.10.2", "3.12")
    older = driver._replace(jax="0.10.1")
    locations = [
        Location("10.0.0.1", "a", None, found) for found in (driver, older, driver._replace(python="3.13"))
    ]

    class Starting:
        processes = endpoints([2, 1])

        def call(self, method, arguments):
            assert method == "locate", "the processes must not go on"
            return locations

    with pytest.raises(RuntimeError) as caught:
        open_groups(Starting(), driver)
    assert str(caught.value).splitlines()[1:-1] == [
        "  the driver: JAX 0.10.2, jaxlib 0.10.2, Python 3.12",
        "  group 0, process 1: JAX 0.10.1, jaxlib 0.10.2, Python 3.12",
        "  group 1: JAX 0.10.2, jaxlib 0.10.2, Python 3.13",
    ]


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError) as caught:
        cluster.launch(
            {"stage": 0}, "stage", platform="", max_in_flight=0, step_timeout=-1, transport="pigeon"
        )
    begins = ["mpmd.launch: platform", "transport", "max_in_flight", "step_timeout", "mesh_shape['stage']"]
    for line, begin in zip(str(caught.value).splitlines(), begins, strict=True):
        assert line.startswith(f"{begin} must be")
    assert "transport must be one of auto, shared_memory, network, device, object_store, not 'pigeon'" in str(
        caught.value
    )


@pytest.mark.parametrize("given_as", ["argument", "variable"])
def test_an_address_where_nothing_listens_is_refused_at_once(monkeypatch, given_as):
    monkeypatch.setattr(ray, "init", None)  # a call would fail
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    if given_as == "variable":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=f"no Ray cluster at {address}, .* refused.* RAY_ADDRESS"):
        cluster.launch({"stage": 2}, "stage", address=address if given_as == "argument" else None)
