"""Groups move, or stay and say why; groups, threads and places only pretend."""

import pytest

from cluster.recovery import Recovery
from cluster.recovery.report import DIED, DRAINED, GROWN, SHRUNK
from tests.support.membership_world import World, committed

SOON = 60
"""Seconds that a call may take. No clock runs: it waits until nothing else happens."""

SAVING = "group 1 does not move, though the cluster has room for it: a checkpoint is being saved"


def test_a_group_moves_at_a_snapshot_of_all_steps_while_others_wait():
    world = committed(steps=2)
    world.look({1: GROWN})
    assert world.settle_all(until="copy_away") and not world.is_running
    submitting = world.begin(world.step)
    world.run(submitting)
    assert not submitting.is_ready()
    world.settle_all()
    assert world.named("restore") == [2] and world.reported == [(GROWN, {1})]
    assert world.reports[0].num_replayed == 0, "the step that waited comes after the move"
    assert list(world.reports[0].seconds)[:2] == ["prepared", "copied"]
    world.check_quiet()


def test_a_group_that_dies_before_it_leaves_takes_the_processes_that_are_ready():
    world = committed()
    world.look({1: GROWN})
    assert world.settle_all(until="find_dead")
    place = world.prepared[1]
    world.kill(1)
    world.settle_all()
    assert world.reported == [(DIED, {1})]
    assert world.groups[1].place == place
    world.check_quiet()


def test_a_death_at_the_moment_of_a_move_is_a_failure():
    world = committed()
    world.look({1: GROWN})
    world.at("detach", lambda: world.kill(0))
    world.settle_all()
    assert world.reported == [(GROWN, {0, 1})]
    world.kill(1)
    world.settle_all()
    assert "the groups have failed 2 times, and max_failures is 1" in str(world.error)


def test_moves_are_no_failures_nor_are_deaths_of_groups_that_are_to_leave():
    world = World(Recovery(max_failures=1))
    for world.has_place in (True, True, False, False):
        world.look({1: DRAINED})
        world.settle_all()
        if not world.has_place:
            world.kill(1)
            world.settle_all()
    assert world.reported == [(DRAINED, {1})] * 2 + [(DIED, {1})] * 2
    assert world.said == ["group 1 does not move, though its node is to end: there is no other place for it"]
    for _ in range(2):
        world.kill(1)
        world.settle_all()
    assert "the groups have failed 2 times" in str(world.error)


def test_groups_that_are_to_move_wait_for_a_recovery_and_the_next_look():
    world = committed()
    world.kill(0)
    world.look({1: SHRUNK})
    world.settle_all()
    assert world.reported == [(DIED, {0})] and world.prepared == {}
    world.look({1: SHRUNK})
    world.settle_all()
    assert world.reported[1:] == [(SHRUNK, {1})]
    world.check_quiet()


NO, GONE = RuntimeError("Ray says no"), OSError("Ray is out of reach")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NO, "group 1 does not move, though the cluster has room for it: Ray says no"),
        (GONE, "the places of groups cannot be looked after: OSError: Ray is out of reach"),
    ],
)
@pytest.mark.parametrize("phase", ["prepare", "find_dead"])
def test_a_move_that_fails_is_told_once_and_the_next_group_moves(phase, error, said):
    world = committed()
    for _ in range(2):
        world.settle_all()
        world.look({1: GROWN, 2: DRAINED})
        world.at(phase, error)
        world.settle_all()
    assert world.said == [said]
    assert (DRAINED, {2}) in world.reported
    world.check_quiet()


def test_why_a_group_does_not_move_is_told_again_when_it_has_moved_since():
    world = World()
    for world.has_place in (False, False, True, False):
        world.look({1: SHRUNK})
        world.settle_all()
    assert len(world.said) == 2 and len(world.reports) == 1


def test_a_group_whose_copies_may_be_gone_does_not_move():
    world, why = (
        committed(),
        "group 2 does not move, though the cluster has room for it: no answer from group 0",
    )
    world.silent = {0}
    with pytest.raises(RuntimeError, match=rf"group 2 did not move within 60 s; {why}"):
        resize(world, 2, {2: GROWN})
    assert world.said == [why] and world.prepared == {}
    world.silent = set()
    world.look({2: GROWN})
    world.settle_all()
    assert world.reported == [(GROWN, {2})]
    world.check_quiet()


def test_a_group_that_is_to_move_may_be_silent_and_is_pinged_before():
    world = committed()
    world.silent = {1}
    world.look({1: GROWN})
    world.settle_all()
    assert "health" in dict(world.phases)
    assert "no answer from group 1" in world.said[0] and world.reported == [(GROWN, {1})]


@pytest.mark.parametrize("kind", [GROWN, DRAINED])
def test_a_checkpoint_is_waited_for_unless_the_node_is_to_end(kind):
    world = committed()
    copy = world.save(0)
    world.settle_all()
    world.look({1: kind})
    world.settle_all()
    if kind == DRAINED:
        assert world.said == []
    else:
        assert world.said == [SAVING] and world.reports == [] and "prepare" not in dict(world.phases)
        world.finish_saving(copy)
        world.look({1: kind})
        world.settle_all()
    assert world.reported == [(kind, {1})]
    world.finish_saving(copy)
    world.check_quiet()


def test_a_copy_that_the_log_has_given_up_is_not_lost_by_a_move():
    world = committed()
    copy = world.save(0)
    world.settle_all()
    with world.ledger.changed:
        world.ledger.drop_copies()  # as a step does that the copy has kept waiting
    world.look({1: GROWN})
    world.settle_all()
    assert world.said == [SAVING]
    world.finish_saving(copy)
    world.look({1: GROWN})
    world.settle_all()
    assert world.reported == [(GROWN, {1})]


def resize(world, num_places, kinds):
    """The user resizes the mesh, whose allocations have these groups move then."""
    world.begin(lambda: world.runtime.resize(num_places, SOON))
    world.look(kinds)
    world.settle_all()


def test_resizing_moves_groups_or_says_why_not():
    world = committed()
    resize(world, 2, {2: SHRUNK})
    assert world.reported == [(SHRUNK, {2})] and dict(world.reports[0].shares_with) == {2: 0}
    with pytest.raises(RuntimeError, match=r"resize\(3\): group 2 did not move within 60 s.*by itself as"):
        resize(world, 3, {})
    resize(world, 3, {2: GROWN})
    assert world.reported[1:] == [(GROWN, {2})]
    world.processes.can_share = False
    with pytest.raises(RuntimeError, match="groups may not share devices here"):
        resize(world, 2, {})
    world.close()
    with pytest.raises(RuntimeError, match="closed"):
        world.runtime.resize(3, SOON)
