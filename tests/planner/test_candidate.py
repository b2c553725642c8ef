"""Candidates are values: equal ones are one key."""

import dataclasses

import pytest

from mpmd.planner.candidate import Candidate
from mpmd.planner.submesh import Submesh
from mpmd.schedules import Interleaved1F1B, ListSchedule, Std1F1B


@pytest.mark.parametrize("schedule", [Std1F1B(2), Interleaved1F1B(4, 2), ListSchedule(2, 2)], ids=str)
def test_equal_candidates_are_one_key(schedule):
    one, other = (
        Candidate((1, 1), ({"data": 2}, submesh), schedule, 4, remat=False, fsdp=True)
        for submesh in ({"model": 1, "data": 2}, Submesh(data=2))
    )
    assert one == other and len({one, other}) == 1
    assert dataclasses.replace(one, later=(other,)) not in {one, other}


def test_a_submesh_is_a_mapping_of_all_axes():
    submesh = Submesh.of({"model": 4, "data": 2})
    assert dict(submesh) == {"model": 4, "sequence": 1, "data": 2}
    assert (submesh.num_devices, submesh.sizes, len(submesh)) == (8, (4, 1, 2), 3)
    assert submesh == {"model": 4, "sequence": 1, "data": 2} != Submesh()
    with pytest.raises(TypeError, match="expert"):
        Submesh.of({"expert": 2})
