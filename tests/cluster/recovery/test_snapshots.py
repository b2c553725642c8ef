"""Snapshots that travel while steps run, are late, or fail; groups, threads and places only pretend."""

import pytest

from cluster.recovery import Recovery
from cluster.recovery.copies import CopiesLostError
from cluster.recovery.report import DIED
from cluster.recovery.store import Snapshot
from mpmd.runtime.requests import Release
from tests.support.membership_world import World, committed

FULL = MemoryError("no room for 3 GiB")
TOLD = (
    "the groups' values could not be copied, which is tried again after 2 steps; until then a death goes "
    "back to the copies before: MemoryError: no room for 3 GiB"
)


def run(world, count, *faults):
    """Steps, all answered; the next snapshots fail so."""
    world.at("copy_away", *faults)
    for _ in range(count):
        world.step()
        world.settle_all()


def test_snapshots_commit_while_steps_run_and_late_ones_make_steps_wait():
    world = World(Recovery(every=2))
    world.step()
    assert world.named("copy_away") == [], "groups answer all steps before"
    assert world.settle_all(until="copy_away")
    for _ in range(7):
        world.step()
    submitting = world.begin(world.step)
    world.run(submitting)
    assert not submitting.is_ready() and world.journal.committed == 0
    world.settle_all()
    assert not submitting.is_alive and world.journal.committed == 2
    world.check_quiet()


def test_processes_that_keep_copies_are_told_of_each_committed_snapshot():
    world = World(Recovery(every=2))
    run(world, 3)
    world.at("check", CopiesLostError("both have died together"))
    world.kill(1)
    world.settle_all()
    assert world.journal.committed == 0 and world.named("mark_committed") == [1, 2]
    assert world.named("restore") == [0]


def test_a_snapshot_that_fails_is_tried_again_and_the_one_before_stays():
    world = World(Recovery(every=2))
    run(world, 1)
    run(world, 3, FULL)
    assert world.said == [TOLD] and world.journal.committed == 1
    assert len(world.named("copy_away")) == 2, "not with every step"
    world.kill(1)
    world.settle_all()
    assert world.named("restore") == [1]
    run(world, 1)
    assert world.journal.committed > 1 and world.error is None
    world.check_quiet()


def test_a_snapshot_that_fails_because_of_a_death_says_nothing():
    world = World(Recovery(every=2))
    world.at("copy_away", lambda: world.die(1))
    run(world, 1)
    assert world.reported == [(DIED, {1})] and world.said == []
    world.check_quiet()


def test_a_process_that_is_silent_when_a_snapshot_fails_is_pinged_until_it_answers_again():
    """Its death may still explain the failure."""
    world = World(Recovery(every=2))
    world.silent = {1}
    world.at("copy_away", FULL)
    world.step()
    for _ in range(2):
        world.settle_all(until="find_dead")
        world.run(world.threads[0])
    assert world.named("health") and world.said == [] and world.supervisor.snapshots.is_travelling
    world.silent = set()
    world.settle_all()
    assert world.said == [TOLD] and world.error is None


def test_a_snapshot_that_fails_while_ray_cannot_say_who_is_alive_is_given_up():
    world = World(Recovery(every=2))
    world.at("find_dead", RuntimeError("Ray cannot say"))
    run(world, 1, FULL)
    assert world.said == [TOLD] and world.error is None


def test_what_a_failed_snapshot_was_to_release_is_released_with_the_next_step():
    world = committed(Recovery(every=100))
    world.settle_all()
    world.runtime.free((0, 1), 41)
    with world.ledger.changed:
        world.supervisor.snapshots.begin()
    world.at("copy_away", FULL)
    world.settle_all()
    step = world.step()
    requests = world.journal.repeatable[-1]
    assert requests.ordinal == step
    assert [requests.released[i].handles for i in range(3)] == [(41,), (41,), ()]


def test_without_any_snapshot_the_run_goes_on_as_long_as_the_log_may_grow():
    world = World(Recovery(every=2))
    run(world, 8, *[FULL] * 5)
    assert world.error is None
    run(world, 1)
    world.step()
    message = r"not be copied 5 times in a row, .*no room.* fewer processes each"
    with pytest.raises(RuntimeError, match=message):
        raise world.told(10)


def test_a_slow_snapshot_that_fails_when_the_log_is_full_does_not_end_the_run():
    world = World(Recovery(every=2))
    world.step()
    world.settle_all(until="copy_away")
    for _ in range(7):  # more would wait for it
        world.step()
    world.at("copy_away", *[FULL] * 4)
    world.settle_all()
    run(world, 3)
    assert world.error is None
    run(world, 2)
    assert "4 times in a row" in str(world.error)


def test_a_snapshot_is_of_the_others_and_tells_what_is_released():
    world = World(num_left_out=1)
    world.runtime.free((3,), 5)
    world.step()
    for i in range(3):
        world.answer(i)
    assert world.run_threads(until="copied")
    asked = [[request for request, _ in group.inbox] for group in world.groups]
    assert [type(request) for (request,) in asked] == [Snapshot] * 3 + [Release]
    assert asked[3][0].released.handles == (5,)
    world.check_quiet()


def test_a_step_of_groups_that_are_left_out_does_not_wait_for_a_late_snapshot():
    world = World(Recovery(every=1), num_left_out=1)
    world.step()
    world.settle_all(until="copy_away")
    while world.may_submit:
        world.step()
    training = world.begin(lambda: world.runtime.wait_to_submit([0, 1]))
    sampling = world.begin(lambda: (world.runtime.wait_to_submit([0, 3]), world.sample(3)))
    for each in (training, sampling):
        world.run(each)
    assert not sampling.is_alive and not training.is_ready()
    world.settle_all()
    assert not training.is_alive
    world.check_quiet()
