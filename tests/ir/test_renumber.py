"""Plans whose groups get other numbers."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpmd
from mpmd.ir.part import Part
from mpmd.ir.participants import participants
from mpmd.ir.renumber import renumbered
from mpmd.verify import verify
from tests.support.small_plans import lowered

GROUPS = 3


@functools.cache
def plan():
    return lowered(mpmd.Std1F1B(GROUPS), [{"data": 1}, {"data": 2}, {"data": 1}]).plan


@given(st.permutations(range(6)))
def test_there_and_back(order):
    numbers = dict(enumerate(order[:GROUPS]))
    submeshes = [(("data", 1),)] * 6
    for group, number in numbers.items():
        submeshes[number] = plan().submeshes[group]
    moved = renumbered(plan(), numbers, submeshes)
    assert participants(moved) == tuple(sorted(numbers.values()))
    assert [program.mpmd_idx for program in moved.programs] == [*range(6)]
    # What is proven of the one holds for the other: the same memory in the same places.
    before, after = verify(plan()).memory, verify(moved).memory
    assert all(after[number].peak_bytes == before[group].peak_bytes for group, number in numbers.items())
    back = {number: group for group, number in numbers.items()}
    assert renumbered(moved, back, plan().submeshes) == plan()


def test_the_text_names_the_part():
    part = Part("sampler", (4, 5, 6))
    moved = renumbered(plan(), {0: 0, 1: 1, 2: 2}, plan().submeshes, part)
    assert str(moved).startswith(
        "part 'sampler': its groups 0, 1, 2 are groups 4, 5, 6 of the mesh\ngroup 0:"
    )
    assert moved.shown().startswith("part 'sampler'")
    assert str(Part("one", (7,))) == "part 'one': its group 0 is group 7 of the mesh"


def test_a_group_that_works_keeps_its_program():
    with pytest.raises(AssertionError, match=r"groups \[2\] have programs"):
        renumbered(plan(), {0: 0, 1: 1}, plan().submeshes[:2])
