"""When a group counts as dead."""

from cluster.driver.calls.health import DEATH_REPORT_SECONDS, PING_SECONDS, UNRESPONSIVE_SECONDS, GroupHealth
from tests.support.processes import endpoints


def test_a_disconnected_group_is_reported_once_after_a_time_for_ray_to_say_why():
    health = GroupHealth(endpoints([1, 1]))
    health.mark_disconnected(1, "", 100.0)
    health.mark_disconnected(1, ": MemoryError: too large", 101.0)
    assert health.take_dead(100.0 + DEATH_REPORT_SECONDS - 0.1) == []
    (error,) = health.take_dead(100.0 + DEATH_REPORT_SECONDS)
    assert error.mpmd_idx == 1
    assert str(error) == ("group 1 is gone: its connection to the driver has ended: MemoryError: too large")
    assert health.take_dead(1000.0) == []


def test_groups_that_answer_are_pinged_again():
    health = GroupHealth(endpoints([1, 1]))
    assert health.ping_is_due(100.0)
    assert health.start_pings(100.0) == [0, 1]
    assert not health.ping_is_due(100.0 + PING_SECONDS - 0.1)
    health.mark_answered(0)
    assert health.ping_is_due(100.0 + PING_SECONDS)
    assert health.start_pings(100.0 + PING_SECONDS) == [0]


def test_a_group_that_leaves_a_ping_unanswered_is_unresponsive():
    health = GroupHealth(endpoints([1, 1]))
    health.start_pings(100.0)
    health.mark_answered(1)
    assert health.unresponsive(100.0 + UNRESPONSIVE_SECONDS - 1) == []
    (error,) = health.unresponsive(100.0 + UNRESPONSIVE_SECONDS)
    assert error.mpmd_idx == 0
    assert str(error) == "group 0 is stuck: its process has not answered for 60 s"


def test_a_group_of_several_processes_is_dead_with_the_first_of_them():
    health = GroupHealth(endpoints([1, 2]))
    health.mark_disconnected(2, "", 100.0)
    health.mark_disconnected(1, "", 100.1)
    assert not health.disconnected_first(1)
    assert health.disconnected_first(2) and health.disconnected_first(0)
    first, second = health.take_dead(100.2 + DEATH_REPORT_SECONDS)
    assert str(first).startswith("group 1, process 1 is gone") and first.mpmd_idx == second.mpmd_idx == 1


def test_a_failed_collective_is_believed_only_after_the_time_to_report_a_death():
    health = GroupHealth(endpoints([2, 1]))
    health.mark_broken(0, "Gloo all-reduce failed", 100.0)
    health.mark_disconnected(1, "", 100.5)
    (error,) = health.take_dead(100.5 + DEATH_REPORT_SECONDS)
    assert str(error) == "group 0, process 1 is gone: its connection to the driver has ended"
    (error,) = health.take_dead(200.0)
    assert (
        "group 0 has failed as a whole: its processes have lost one another; process 0 reports: Gloo"
        in str(error)
    )
    assert health.take_dead(300.0) == []
