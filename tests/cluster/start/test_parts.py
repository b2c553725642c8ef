"""Parts of a mesh in the arguments of ``launch``."""

import pytest

import cluster
from cluster.start.parts import groups_of_parts

SHAPES = {"actor": {"stage": 2}, "sampler": {"stage": 1, "model": 2}}


def test_the_groups_of_shapes():
    of_parts = groups_of_parts(SHAPES, None)
    assert of_parts.mpmd_axis == "stage"
    assert of_parts.groups == [{"stage": 1}, {"stage": 1}, {"stage": 1, "model": 2}]
    assert of_parts.parts == {"actor": 2, "sampler": 1}
    assert groups_of_parts({"all": {"model": 2, "stage": 3}}, "stage").parts == {"all": 3}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"parts": SHAPES, "mesh_shape": {"stage": 3}},
            ValueError,
            "leave out mesh_shape: parts has",
        ),
        ({"parts": SHAPES, "groups": [{"data": 1}]}, ValueError, "leave out groups: parts has a shape"),
        ({"parts": SHAPES, "mpmd_axis": "row"}, ValueError, r"parts\['actor'\] has no axis mpmd_axis='row'"),
        (
            {"parts": {"a": {"stage": 1}, "b": {"model": 1, "stage": 1}}},
            ValueError,
            r"parts\['b'\] begins with the axis 'model', and another part with 'stage'",
        ),
        ({"parts": {"a": {"stage": 1}, "b": 2}}, TypeError, r"parts\['b'\] must be a dict of axis names"),
        ({"parts": {"a": {"stage": 1}, "b": {}}}, ValueError, r"parts\['b'\] has no axis"),
        ({"parts": {"a": {"stage": 0}}}, ValueError, r"parts\['a'\]\['stage'\]"),
        (
            {"parts": {"a": 1}, "mesh_shape": {"stage": 2}, "mpmd_axis": "stage"},
            ValueError,
            "parts has 1 groups, and the mesh 2",
        ),
        ({"parts": 3, "groups": [{"data": 1}]}, TypeError, "parts must be a dict"),
    ],
)
def test_bad_parts(options, error, message):
    with pytest.raises(error, match=message):
        cluster.launch(**options)
