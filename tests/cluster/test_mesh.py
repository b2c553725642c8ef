"""The mesh of running groups, of which nothing runs."""

import pytest

import mpmd
from cluster.mesh import ClusterMesh
from cluster.protocol.process_info import ProcessPlacement
from mpmd.ir.routes import GroupShape, Topology


def mesh_of(submeshes, parts=None):
    topology = Topology(tuple(map(GroupShape, submeshes)))
    return ClusterMesh(
        topology, "stage", {}, "cpu", None, ProcessPlacement((), {}), {}, [], [], lambda: None, parts
    )


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (mesh_of([{"stage": 1, "data": 2}] * 3), "{'stage': 3, 'data': 2}, mpmd_axis='stage'"),
        (
            mesh_of([{"stage": 1}] * 3, {"trainer": 2, "sampler": 1}),
            "{'stage': 3}, mpmd_axis='stage', parts={'trainer': 2, 'sampler': 1}",
        ),
        (
            mesh_of([{"stage": 1, "model": 1}, {"stage": 1, "model": 2}], {"trainer": 1, "sampler": 1}),
            "[{'stage': 1, 'model': 1}, {'stage': 1, 'model': 2}], mpmd_axis='stage', "
            "parts={'trainer': 1, 'sampler': 1}",
        ),
    ],
)
def test_the_text_has_one_shape_only_where_all_groups_have_it(mesh, text):
    assert repr(mesh) == f"ClusterMesh({text}, platform='cpu', nodes=0)"


def test_a_part_of_another_mesh_is_not_replaced():
    parts = {"trainer": 2, "sampler": 1}
    other = mpmd.AbstractMpmdMesh({"stage": 3}, "stage", parts=parts)
    with pytest.raises(ValueError, match=r"replace: part 'sampler', groups 2, of .* a part of another mesh"):
        mesh_of([{"stage": 1}] * 3, parts).replace(other.part("sampler"))


@pytest.mark.parametrize("number", [0, 5])
def test_numbers_of_places_that_cannot_be(number):
    with pytest.raises(ValueError, match=f"num_places must be a whole number from 1 to 4, not {number}"):
        mesh_of([{"stage": 1}] * 4).resize(number)
