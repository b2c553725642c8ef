"""Groups are asked again for what they were to save; groups, threads and places only pretend."""

import pytest

from cluster.recovery import Recovery
from cluster.recovery.copies import CopiesLostError
from cluster.recovery.journal import BEGINNING
from mpmd.errors import GroupDiedError, StateLostError
from mpmd.runtime.requests import CopyOut, Write
from tests.support.membership_world import World, committed

WRITTEN = [16]


def saving():
    """A world in which group 0 has copied a value, with a step since, and the copy."""
    world = committed(Recovery(every=100), steps=0)
    copy = world.save(0)
    world.step()
    world.settle_all()
    return world, copy


def test_a_group_is_asked_to_write_a_copy_when_it_is_there():
    world = committed(steps=0)
    writing = world.write(0, world.save(0))
    assert [type(request) for request, _ in world.groups[0].inbox] == [CopyOut]
    world.settle_all()
    assert world.told(writing) == WRITTEN


@pytest.mark.parametrize("asked", ["before", "meanwhile"])
@pytest.mark.parametrize("dead", [0, 1])
def test_what_is_being_saved_is_copied_and_written_again_after_a_death(asked, dead):
    world, copy = saving()
    if asked == "before":
        writing = world.write(0, copy)
    world.kill(dead)
    if asked == "meanwhile":
        writing = world.write(0, copy)
    world.settle_all()
    assert world.told(writing) == WRITTEN
    world.kill(1)
    world.settle_all()
    assert world.groups[0].copied == set(), "it is written"
    world.finish_saving(copy)
    world.check_quiet()


def test_a_write_that_succeeds_after_all_groups_went_back_counts_whoever_asked_for_it():
    """The first write was queued behind another one, and has written the second copy."""
    world, copy = saving()
    writing = world.write(0, copy)
    _, first = world.groups[0].inbox.pop()
    world.step(is_donated=True, fails=True)
    assert world.settle_all(until="restore") and not world.run_threads()
    while world.groups[0].copied == set():
        world.answer(0)
    assert world.told(writing) is None
    first.set_result([1])
    assert world.told(writing) == [1]
    assert Write not in [type(request) for request, _ in world.groups[0].inbox], "it is written"
    world.settle_all()
    assert world.error is None


def test_a_copy_that_is_freed_is_not_made_again():
    world, copy = saving()
    world.finish_saving(copy)
    world.kill(1)
    world.settle_all()
    assert world.groups[0].copied == set()


def test_a_snapshot_waits_for_what_is_being_saved_and_a_step_does_not():
    world = World(Recovery(every=2))
    copy = world.save(0)
    for _ in range(8):
        world.step()
        world.settle_all()
        assert world.journal.committed == BEGINNING
    assert world.journal.snapshot.is_copied
    world.step()
    assert world.journal.committed == 1, "the log is too long, and the copy is given up"
    before = world.write(0, copy)
    world.kill(1)
    refused = world.write(0, copy)
    world.settle_all()
    for writing in (before, refused):
        assert isinstance(world.told(writing), GroupDiedError)
    assert world.groups[0].copied == set()


@pytest.mark.parametrize("end", [StateLostError, RuntimeError])
def test_saving_fails_when_values_are_lost_or_the_run_ends(end):
    world, copy = saving()
    writing = world.write(0, copy)
    if end is StateLostError:
        world.at("check", CopiesLostError("both have died together"))
        world.kill(1)
        world.settle_all()
    else:
        world.close()
        assert "the mesh was closed" in str(world.told(writing))
    assert isinstance(world.told(writing), end)
