"""Membership in one situation after the other, with groups, threads and places that only pretend."""

import pytest

from cluster.recovery import Recovery
from cluster.recovery.allocations import NoAllocationError
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.policy import FailureCounter
from cluster.recovery.replacement import Replacement
from cluster.recovery.report import DIED, FAILED, GROWN
from mpmd.errors import GroupDiedError, RecoveryError
from tests.support.membership_world import World, committed

RECOVERING = """kill reset start open await_reset check connect load restore connect_driver""".split()


# Deaths.


@pytest.mark.parametrize("phase", RECOVERING[2:])
def test_groups_that_die_while_others_are_replaced_are_one_failure(phase):
    world = committed()
    world.kill(1)
    world.at(phase, lambda: world.die(2))
    world.settle_all()
    assert world.reported == [(DIED, {1, 2})]
    world.check_quiet()


def test_a_group_that_has_died_meanwhile_has_its_programs_when_no_copies_are_left():
    world = committed()
    world.kill(1)
    world.at("open", lambda: world.die(2))
    world.at("check", CopiesLostError("both have died together"))
    world.settle_all()
    assert world.named("start") == [{1}, {2}, set()] and world.named("load") == [{1, 2}]
    assert world.reported == [(DIED, {1, 2}, "both have died together")]
    world.check_quiet()


@pytest.mark.parametrize("phase", ["open", "connect"])
def test_processes_that_were_started_stay_when_others_die(phase):
    world = committed()
    world.kill(1)
    first = []
    world.at(phase, lambda: (first.append(world.groups[1]), world.die(2)))
    world.settle_all()
    assert world.groups[1] is first[0]
    assert world.named("start")[0] == {1}


def test_groups_that_die_before_calls_have_ended_are_replaced_together():
    world = committed()
    world.kill(1)
    world.kill(2)
    world.kill(2)
    world.settle_all()
    assert world.named("start") == [{1, 2}]


def test_a_death_while_steps_are_run_again_is_another_recovery():
    world = World()
    world.step()
    world.settle_all()
    world.step()
    world.kill(1)
    world.run_threads()
    world.kill(2)
    assert world.settle_all(until="kill")
    assert world.reported == [(DIED, {1})]
    world.settle_all()
    assert world.reported == [(DIED, {1}), (DIED, {2})]
    world.check_quiet()


def test_answers_of_an_earlier_attempt_do_not_count():
    world = committed()
    world.fetch(0)
    world.kill(1)
    for _ in range(2):
        world.answer(0)
    assert not any(future.done() for (name, i), future in world.futures.items() if name != 1)
    world.check_quiet()


# Failed steps.


def test_what_is_asked_after_a_step_has_failed_waits_until_its_inputs_are_there_again():
    world = World(Recovery(every=100))
    world.step()
    world.settle_all()
    world.step(is_donated=True, fails=True)
    world.step()
    for mpmd_idx in range(3):
        world.answer(mpmd_idx)
    assert not world.is_running and world.named("restore") == []
    fetched = world.fetch(1)
    world.settle_all()
    assert world.told(fetched, 1) == (1, 3)
    world.check_quiet()


@pytest.mark.parametrize("phase", ["check", "restore"])
def test_a_group_that_dies_while_all_go_back_for_a_step_is_replaced_and_counts(phase):
    world = World(Recovery(max_failures=1))
    world.step(is_donated=True, fails=True)
    world.at(phase, lambda: world.kill(0))
    world.settle_all()
    assert world.reported == [(DIED, {0})]
    world.kill(1)
    world.settle_all()
    assert "the groups have failed 2 times" in str(world.error)
    world.check_quiet()


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_not_logged_ends_before_all_go_back(fails):
    world = World(Recovery(every=100), num_left_out=1)
    world.step()
    world.settle_all()
    world.sample(3)
    world.step(is_donated=fails, fails=fails)
    if not fails:
        world.rewind()
    for mpmd_idx in range(3):
        world.answer(mpmd_idx)
    world.run_threads()
    assert not world.is_running and world.named("restore") == []
    world.settle_all()
    assert len(world.named("restore")) == 1
    world.check_quiet()


@pytest.mark.parametrize("phase", ["check", "restore"])
def test_all_connect_anew_when_they_cannot_go_back_for_a_step_though_nobody_has_died(phase):
    world = World()
    world.step(is_donated=True, fails=True)
    world.at(phase, RuntimeError("no memory"))
    world.settle_all()
    assert world.reported == [(FAILED, set())] and "no memory" in world.reports[0].reason
    assert "connect" in [name for name, _ in world.phases]
    world.check_quiet()


# Giving up.


def test_a_step_that_kills_twice_ends_the_run():
    world = committed()
    for _ in range(2):
        world.kill(1)
        world.run_threads()
    assert "step 2 has ended the process of group 1 twice" in str(world.error)
    world.check_quiet()


def replacement(*dead, processes=1):
    """One that has begun for these groups."""
    death = GroupDiedError("group 0 died", dead[0])
    begun = Replacement(death, None, DIED, (processes,) * 3, FailureCounter(2))
    begun.begin(dead, is_failure=True, snapshot=7)
    assert begun.dead == set(dead)
    return begun


def again(under_way, error, dead=(), unopened=(), node_is_gone=False):
    """The groups whose processes are replaced when groups could not be replaced."""
    under_way.begin_again(error, set(dead), set(unopened), node_is_gone)
    return under_way.dead


def test_a_new_process_that_dies_is_a_failure_unless_its_node_is_gone():
    under_way = replacement(0)
    death = GroupDiedError("group 0 has died", 0)
    for _ in range(3):
        assert again(under_way, death, {0}, node_is_gone=True) == {0}
    assert again(under_way, death, {0}) == {0}
    with pytest.raises(RecoveryError, match="failed 3 times, and max_failures is 2; the last time because"):
        again(under_way, death, {0})


@pytest.mark.parametrize("error", [RuntimeError("its devices are in use"), NoAllocationError("no room")])
def test_a_fault_without_a_death_and_a_lack_of_places_are_failures(error):
    under_way = replacement(0)
    assert again(under_way, error) == {0}, "it may be why"
    with pytest.raises(RecoveryError, match="the last time because"):
        again(under_way, error, unopened={0})


def test_new_processes_that_were_to_take_their_devices_are_replaced_with_a_death():
    under_way = replacement(0)
    assert again(under_way, GroupDiedError("group 2 has died", 2), {2}, unopened={0}) == {0, 2}


def test_new_processes_of_a_group_that_may_be_meeting_are_replaced_with_a_death():
    death = GroupDiedError("group 1 has died", 1)
    assert again(replacement(0), death, {1}) == {1}
    assert again(replacement(0, processes=2), death, {1}) == {0, 1}


def test_a_fault_of_which_nothing_is_known_ends_the_run():
    world = committed()
    world.kill(1)
    world.at("find_dead", RuntimeError("Ray is gone"))
    world.at("connect", RuntimeError("no answer"))
    world.settle_all()
    assert isinstance(world.error, RecoveryError)
    assert "group 1 died. The groups do not recover: Ray is gone. Start" in str(world.error)
    world.check_quiet()


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_node_that_is_gone_explains_the_death_of_new_processes(is_gone):
    world = committed()
    world.gone = is_gone
    world.kill(1)
    for _ in range(3):
        world.at("connect", lambda: world.die(1))
    world.settle_all()
    assert (world.error is None) == is_gone
    assert is_gone or "the groups have failed 2 times" in str(world.error)
    world.check_quiet()


# The end.


@pytest.mark.parametrize("phase", ["detach", *RECOVERING])
def test_the_mesh_is_closed_while_groups_are_replaced(phase):
    world = committed()
    world.kill(1)
    close_during(world, phase)


@pytest.mark.parametrize("phase", ["look", "prepare", "copy_away", "detach", *RECOVERING, "start_spares"])
def test_the_mesh_is_closed_while_a_group_moves(phase):
    world = committed()
    world.look({1: GROWN})
    close_during(world, phase)


def close_during(world, phase):
    """The mesh is closed during a phase, which may have started a process."""
    world.at(phase, world.close)
    world.settle_all()
    assert world.said == []
    world.check_quiet()
