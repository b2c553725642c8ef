"""When a group counts as dead."""

from cluster.health import DEATH_REPORT_SECONDS, PING_SECONDS, UNRESPONSIVE_SECONDS, GroupHealth


def test_a_disconnected_group_is_reported_once_after_a_time_for_ray_to_say_why():
    health = GroupHealth(2)
    health.mark_disconnected(1, "", 100.0)
    health.mark_disconnected(1, ": MemoryError: too large", 101.0)
    assert health.take_disconnected(100.0 + DEATH_REPORT_SECONDS - 0.1) == []
    (error,) = health.take_disconnected(100.0 + DEATH_REPORT_SECONDS)
    assert error.mpmd_idx == 1
    assert str(error) == ("group 1 is gone: its connection to the driver has ended: MemoryError: too large")
    assert health.take_disconnected(1000.0) == []


def test_groups_that_answer_are_pinged_again():
    health = GroupHealth(2)
    assert health.ping_is_due(100.0)
    assert health.start_pings(100.0) == [0, 1]
    assert not health.ping_is_due(100.0 + PING_SECONDS - 0.1)
    health.mark_answered(0)
    assert health.ping_is_due(100.0 + PING_SECONDS)
    assert health.start_pings(100.0 + PING_SECONDS) == [0]


def test_a_group_that_leaves_a_ping_unanswered_is_unresponsive():
    health = GroupHealth(2)
    health.start_pings(100.0)
    health.mark_answered(1)
    assert health.unresponsive(100.0 + UNRESPONSIVE_SECONDS - 1) == []
    (error,) = health.unresponsive(100.0 + UNRESPONSIVE_SECONDS)
    assert error.mpmd_idx == 0
    assert str(error) == "group 0 is stuck: its process has not answered for 60 s"
