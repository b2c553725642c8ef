"""Membership in one situation after the other, with groups, threads and places that only pretend."""

from unittest.mock import Mock

import pytest

from cluster.recovery import Recovery
from cluster.recovery.allocations import NoAllocationError
from cluster.recovery.report import DIED, FAILED, GROWN
from mpmd.errors import GroupDiedError, RecoveryError, TaskError
from mpmd.runtime.requests import Analyses, Fetch, Read
from tests.support.membership_world import STATE, World, committed

RECOVERING = """kill reset start open await_reset check connect load restore""".split()


# Deaths.


@pytest.mark.parametrize("phase", RECOVERING[2:])
def test_groups_that_die_while_others_are_replaced_are_one_failure(phase):
    world = committed()
    world.kill(1)
    world.at(phase, lambda: world.die(2))
    world.settle_all()
    assert world.reported == [(DIED, {1, 2})]
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


@pytest.mark.parametrize(
    "wait",
    [
        lambda runtime: runtime.wait_to_submit([0, 1]),
        lambda runtime: runtime.ask({1: Read({})}),
        lambda runtime: runtime.ask({0: Analyses(0), 1: Analyses(0)}),
        lambda runtime: runtime.ask({3: Fetch(STATE)}),
    ],
    ids=["step", "read", "analyses", "left out"],
)
def test_what_is_not_kept_for_later_waits_for_a_recovery(wait):
    world = World(num_left_out=1)
    world.kill(1)
    waiting = world.begin(lambda: wait(world.runtime))
    world.run(waiting)
    assert not waiting.is_ready()
    world.settle_all()
    assert not waiting.is_alive
    world.check_quiet()


def test_a_fault_in_what_follows_a_recovery_ends_the_run(monkeypatch):
    world = committed()
    monkeypatch.setattr(world.supervisor, "attach", Mock(side_effect=OSError("no descriptors are left")))
    world.kill(1)
    with pytest.raises(OSError, match="no descriptors"):
        world.settle_all()
    assert "the groups cannot be looked after: OSError('no descriptors are left')" in str(world.error)
    world.check_quiet()


# Failed steps.


def test_deaths_count_and_failed_steps_do_not():
    world = World(Recovery(max_failures=1))
    for _ in range(3):
        world.step(is_donated=True, fails=True)
        world.settle_all()
    world.kill(0)
    world.settle_all()
    assert world.reported == [(FAILED, set())] * 3 + [(DIED, {0})] and world.error is None


def test_groups_stay_when_a_failed_step_has_taken_nothing_over():
    world = World()
    failed = world.step(fails=True)
    world.settle_all()
    assert isinstance(world.told(failed), TaskError) and world.named("restore") == []
    world.check_quiet()


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


@pytest.mark.parametrize(
    ("phase", "error"),
    [("connect", RuntimeError("its devices are in use")), ("start", NoAllocationError("no room"))],
)
def test_a_fault_without_a_death_and_a_lack_of_places_are_failures(phase, error):
    world = committed(Recovery(every=100, max_failures=2))
    world.kill(1)
    world.at(phase, error, error)
    world.settle_all()
    assert f"failed 3 times, and max_failures is 2; the last time because {error}" in str(world.error)
    assert world.named("kill") == [{1}, {1}], "the new process may be why"
    world.check_quiet()


def test_new_processes_that_were_to_take_their_devices_are_replaced_with_a_death():
    world = committed()
    world.kill(1)
    world.at("start", lambda: world.die(2))
    world.at("open", GroupDiedError("group 2 has died", 2))
    world.settle_all()
    assert world.named("kill") == [{1}, {1, 2}]
    world.check_quiet()


@pytest.mark.parametrize(("processes", "killed"), [(1, {2}), (2, {1, 2})])
def test_new_processes_of_a_group_that_may_be_meeting_are_replaced_with_a_death(processes, killed):
    world = committed()
    world.driver.processes_per_group = (processes,) * 3
    world.kill(1)
    world.at("start", lambda: world.die(2))
    world.settle_all()
    assert world.named("kill") == [{1}, killed]
    world.check_quiet()


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
    assert is_gone or "failed 2 times, and max_failures is 1; the last time because" in str(world.error)
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
