"""Membership in one situation after the other, with groups, threads and places that only pretend."""

import collections

import pytest

from cluster.recovery import Recovery
from cluster.recovery import actions as do
from cluster.recovery.allocations import NoAllocationError
from cluster.recovery.events import Answered, Died, Done, State, Unneeded
from cluster.recovery.journal import BEGINNING, Outcome
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.membership import Membership
from cluster.recovery.policy import FailureCounter
from cluster.recovery.procedures import Reconnected
from cluster.recovery.replacement import GroupLostError, Replacement
from cluster.recovery.report import DIED, DRAINED, GROWN, SHRUNK, Phases
from mpmd.errors import GroupDiedError, RecoveryError
from mpmd.runtime.requests import StepReply
from tests.support.membership_world import World

RECOVERING = """kill reset start open await_reset check connect load restore connect_driver""".split()
AFTERWARDS = ["report", "start_spares"]


def committed():
    """A world of which a snapshot is committed, and a step is under way since."""
    world = World(Recovery(every=100, max_failures=1))
    world.step()
    world.settle_all()
    assert world.journal.committed != BEGINNING
    world.step()
    return world


def stop_at(world, job):
    """The thread that carries out such a job next, when groups answer meanwhile."""
    thread = world.settle_all(until=job)
    assert thread is not None, f"no thread comes to {job.__name__}"
    return thread


def phases(world):
    return [name for name, _ in world.phases]


def kinds(world):
    return [(report.kind, set(report.mpmd_idxs), report.lost is not None) for report in world.reports]


# Deaths.


@pytest.mark.parametrize("phase", RECOVERING[2:])
def test_groups_that_die_while_others_are_replaced_are_one_failure(phase):
    world = committed()
    world.kill(1)
    world.at(phase, lambda: world.die(2))
    world.settle_all()
    assert kinds(world) == [(DIED, {1, 2}, False)]
    world.check_quiet()


def test_a_group_that_has_died_beside_others_has_its_programs_when_no_copies_are_left():
    world = committed()
    world.kill(1)
    world.at("open", lambda: world.die(2))
    world.at("check", CopiesLostError("both have died together"))
    world.settle_all()
    assert world.named("start") == [{1}, {2}, set()] and world.named("load") == [{1, 2}]
    assert kinds(world) == [(DIED, {1, 2}, True)]
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
    world.settle_all(until=do.Recover)
    world.run_threads(until=do.Recover)
    assert kinds(world) == [(DIED, {1}, False)]
    world.settle_all()
    assert kinds(world) == [(DIED, {1}, False), (DIED, {2}, False)]
    world.check_quiet()


def test_answers_of_an_earlier_attempt_do_not_count():
    world = committed()
    (step,) = {request for request, _ in world.futures}
    attempt = world.journal.attempt
    world.kill(1)
    world.tell(Answered(attempt, Outcome(step, 0, StepReply({}))))
    death = GroupDiedError("group 1 died", 1)
    world.tell(Answered(world.journal.attempt, Outcome(step, 0, error=death)))
    assert (step, 0) not in world.told
    world.check_quiet()


# Snapshots.


# Failed steps.


def test_what_is_asked_after_a_step_has_failed_waits_until_its_inputs_are_there_again():
    world = World(Recovery(every=100))
    world.step()
    world.settle_all()
    world.step(donated=(0,), fails=True)
    world.step()
    for mpmd_idx in range(3):
        world.answer(mpmd_idx)
    assert not world.membership.is_running and world.named("restore") == []
    world.fetch(1)
    world.settle_all()
    assert (1, 3) in world.told.values()
    world.check_quiet()


@pytest.mark.parametrize("phase", ["check", "restore"])
def test_a_group_that_dies_while_all_go_back_for_a_step_is_replaced_and_counts(phase):
    world = World(Recovery(max_failures=1))
    world.step(donated=(0,), fails=True)
    world.at(phase, lambda: world.kill(0))
    world.settle_all()
    world.tell(Unneeded())
    assert kinds(world) == [(DIED, {0}, False)]
    world.kill(1)
    world.settle_all()
    assert "the groups have failed 2 times" in str(world.membership.error)
    world.check_quiet()


# Lost values.


# Moves.


def test_a_group_that_dies_before_it_leaves_takes_the_processes_that_are_ready():
    world = committed()
    world.look({1: GROWN})
    world.run_threads()
    place = world.prepared[1]
    world.kill(1)
    world.settle_all()
    assert kinds(world) == [(DIED, {1}, False)]
    assert world.groups[1].place == place
    world.check_quiet()


def test_groups_that_are_to_leave_may_die():
    world = World(Recovery(max_failures=1))
    world.has_place = False
    for _ in range(2):
        world.look({1: DRAINED})
        world.run_threads()
        world.kill(1)
        world.settle_all()
    assert kinds(world) == [(DIED, {1}, False)] * 2
    assert world.said == ["group 1 does not move, though its node is to end: there is no other place for it"]
    world.kill(1)
    world.settle_all()
    world.kill(1)
    world.settle_all()
    assert "the groups have failed 2 times" in str(world.membership.error)


def test_groups_that_are_to_move_wait_for_a_recovery_and_the_next_look():
    world = committed()
    world.kill(0)
    world.look({1: SHRUNK})
    world.settle_all()
    assert kinds(world) == [(DIED, {0}, False)] and world.prepared == {}
    world.look({1: SHRUNK})
    world.settle_all()
    assert kinds(world)[1:] == [(SHRUNK, {1}, False)]
    world.check_quiet()


NO, GONE = RuntimeError("Ray says no"), OSError("Ray is out of reach")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NO, "group 1 does not move, though the cluster has room for it: Ray says no"),
        (GONE, "the places of groups cannot be looked after: OSError: Ray is out of reach"),
    ],
)
@pytest.mark.parametrize("phase", ["prepare", "find_dead", "start_spares"])
def test_a_move_that_fails_is_told_once_and_the_next_group_moves(phase, error, said):
    world = committed()
    for _ in range(2):
        world.settle_all()
        world.look({1: GROWN, 2: DRAINED})
        world.at(phase, error)
        world.settle_all()
    assert world.said == [said]
    assert (DRAINED, {2}, False) in kinds(world)
    world.check_quiet()


def test_why_a_group_does_not_move_is_told_again_when_it_has_moved_since():
    world = World()
    for world.has_place in (False, False, True, False):
        world.look({1: SHRUNK})
        world.settle_all()
    assert len(world.said) == 2 and len(world.reports) == 1


def test_a_move_that_cannot_be_reported_has_ended():
    world = committed()
    world.look({1: GROWN})
    world.at("report", OSError("Ray is out of reach"))
    stop_at(world, do.StartSpares)
    assert world.said == ["a recovery cannot be reported: OSError: Ray is out of reach"]
    world.check_quiet()


# Giving up.


def test_a_step_that_kills_twice_ends_the_run():
    world = committed()
    for _ in range(2):
        world.kill(1)
        world.run_threads()
    assert "step 2 has ended the process of group 1 twice" in str(world.membership.error)
    world.check_quiet()


def replacement(*dead, processes=1):
    """One that has begun for these groups."""
    death = GroupDiedError("group 0 died", dead[0])
    begun = Replacement(death, None, DIED, (processes,) * 3, FailureCounter(2))
    assert begun.begin(dead, is_failure=True, snapshot=7).dead == set(dead)
    return begun


def again(under_way, cause, dead=(), **facts):
    """The groups whose processes are replaced when groups could not be replaced."""
    error = GroupLostError(dead, **facts)
    error.__cause__ = cause
    return under_way.begin_again(error).dead


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


def test_a_death_beside_processes_that_open_is_a_failure_if_it_is_a_new_one():
    under_way = replacement(0)
    death = GroupDiedError("group 2 has died", 2)
    assert again(under_way, death, {2}, beside={1}) == {2}
    assert under_way.replaced == {0, 1, 2}
    assert again(under_way, death, set(), beside={1}, unopened={1}) == {1}
    with pytest.raises(RecoveryError):
        again(under_way, death, set(), beside={1}, unopened={1})


def test_new_processes_that_were_to_take_their_devices_are_replaced_with_a_death():
    under_way = replacement(0)
    assert again(under_way, GroupDiedError("group 2 has died", 2), {2}, unopened={0}) == {0, 2}


def test_new_processes_of_a_group_that_may_be_meeting_are_replaced_with_a_death():
    death = GroupDiedError("group 1 has died", 1)
    assert again(replacement(0), death, {1}) == {1}
    assert again(replacement(0, processes=2), death, {1}) == {0, 1}


def test_a_fault_of_which_nothing_is_known_ends_the_run():
    with pytest.raises(RecoveryError, match=r"group 0 died\. The groups do not recover: Ray is gone\. Start"):
        replacement(0).begin_again(RuntimeError("Ray is gone"))


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_node_that_is_gone_explains_the_death_of_new_processes(is_gone):
    world = committed()
    world.gone = is_gone
    world.kill(1)
    for _ in range(3):
        world.at("connect", lambda: world.die(1))
    world.settle_all()
    assert (world.membership.error is None) == is_gone
    assert is_gone or "the groups have failed 2 times" in str(world.membership.error)
    world.check_quiet()


# The end.


@pytest.mark.parametrize("phase", ["detach", *RECOVERING, *AFTERWARDS])
def test_the_mesh_is_closed_while_groups_are_replaced(phase):
    world = committed()
    world.kill(1)
    close_during(world, phase)


@pytest.mark.parametrize("phase", ["prepare", "copy_away", "detach", *RECOVERING, *AFTERWARDS])
def test_the_mesh_is_closed_while_a_group_moves(phase):
    world = committed()
    world.look({1: GROWN})
    close_during(world, phase)


def test_the_mesh_is_closed_while_places_are_looked_for():
    world = committed()
    world.threads.append(collections.deque([do.Look()]))
    close_during(world, "look")


def close_during(world, phase):
    """The mesh is closed during a phase, which may have started a process."""
    world.at(phase, lambda: (world.done.clear(), world.close()))
    world.settle_all()
    assert {type(job) for job in world.done[1:]} <= {do.ReportRecovery, do.ReleaseAll}
    world.check_quiet()


def test_connections_that_come_too_late_are_closed():
    membership = Membership(Recovery(), [1, 1])
    membership.handle(Died(GroupDiedError("group 0 died", 0)))
    membership.state = State.ENDED
    recovering = do.Recover(frozenset(), frozenset(), 0, Phases())
    ended = membership.handle(Done(recovering, Reconnected(["one"], frozenset())))
    assert ended == [do.Disconnect(["one"]), do.ReleaseAll()]
