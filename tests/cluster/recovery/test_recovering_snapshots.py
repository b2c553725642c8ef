"""Snapshots of the runtime that recovers, with groups and processes that only pretend."""

import threading
from unittest.mock import Mock

import pytest

from cluster.recovery import Recovery
from cluster.recovery.journal import BEGINNING
from mpmd.errors import GroupDiedError
from tests.support.pretended_groups import (
    SOON,
    TOGETHER,
    await_that,
    await_told,
    commit_snapshot,
    fail_snapshot,
    runtime,
)


def test_snapshots_commit_while_steps_run_and_late_ones_make_steps_wait():
    driven = runtime(Recovery(every=2))
    driven.step()
    calls = driven.attempts[0]
    assert calls.named("Snapshot") == [], "groups answer all steps before"
    calls.reply(0)
    await_snapshot(driven)
    copying = [future for _, method, _, future in calls.made if method == "Snapshot"]
    assert len(copying) == 2
    for index in range(1, 8):
        driven.step()
        calls.reply(index)
    submitted = threading.Event()
    threading.Thread(target=lambda: (driven.step(), submitted.set()), daemon=True).start()
    assert not submitted.wait(0.1)
    for future in copying:
        future.set_result(None)
    driven._processes.may_copy.set()
    assert submitted.wait(SOON)
    assert driven._processes.copied == [(1, 0)]
    driven.die(0)
    assert driven._processes.restored == [1]
    assert len(driven.attempts[1].steps) == 8  # the first one is in the snapshot


def answered_steps(driven, count):
    """Steps, of which the last one is followed by a snapshot if one is due."""
    for _ in range(count):
        driven.step()
        driven.attempts[-1].reply(-1)
        await_snapshot(driven)


def await_snapshot(driven):
    """Until the snapshot that is due has begun."""
    with driven.changed:
        assert driven.changed.wait_for(lambda: driven._ledger.is_running or driven.error, SOON)


def test_processes_that_keep_copies_are_told_of_each_committed_snapshot(monkeypatch):
    driven = runtime(Recovery(every=2))
    told = []
    monkeypatch.setattr(driven._processes, "mark_committed", lambda: told.append(driven.journal.committed))
    answered_steps(driven, 1)
    commit_snapshot(driven)
    answered_steps(driven, 2)
    commit_snapshot(driven)
    driven._processes.failures = [TOGETHER]
    driven.die(1)
    assert driven.journal.committed == BEGINNING and told == [1, 2]


def test_a_snapshot_that_fails_is_tried_again_and_the_one_before_stays(capsys):
    driven = runtime(Recovery(every=2))
    answered_steps(driven, 1)
    commit_snapshot(driven)
    answered_steps(driven, 2)
    fail_snapshot(driven, MemoryError("no room for 3 GiB"))
    told = await_told(capsys, "could not be copied, which is tried again after 2 steps")
    assert "no room for 3 GiB" in told
    answered_steps(driven, 1)
    assert driven.journal.snapshot is None, "not with every step"
    driven.die(1)
    assert driven._processes.restored == [1]
    for index in range(3):
        driven.attempts[1].reply(index)
    answered_steps(driven, 1)
    commit_snapshot(driven)
    assert driven.journal.committed > 1
    assert driven.error is None


def test_a_snapshot_that_fails_because_of_a_death_says_nothing(monkeypatch, capsys):
    driven = runtime(Recovery(every=2))
    monkeypatch.setattr(driven._processes, "find_dead", lambda: {1})
    answered_steps(driven, 1)
    for _, method, _, copied in driven.attempts[0].made:
        if method == "Snapshot":
            copied.set_exception(GroupDiedError("group 1 died", 1))
    driven.die(1)
    await_that(lambda: not driven._supervisor.snapshots.is_travelling)
    assert "could not be copied" not in capsys.readouterr().err and driven.error is None


def test_a_process_that_is_silent_when_a_snapshot_fails_is_pinged(monkeypatch):
    driven = runtime(Recovery(every=2))
    monkeypatch.setattr(driven._processes, "find_dead", lambda: {1})
    answered_steps(driven, 1)
    for future in snapshot_futures(driven):
        future.set_exception(MemoryError("no room"))
    await_that(lambda: [number for number, method, *_ in driven.attempts[0].made if method == "health"])
    assert driven._supervisor.snapshots.is_travelling, "its death may still explain the failure"
    driven.die(1)
    await_that(lambda: not driven._supervisor.snapshots.is_travelling)


def test_a_snapshot_that_fails_is_given_up_as_soon_as_all_processes_answer_again(monkeypatch, capsys):
    driven = runtime(Recovery(every=2))
    monkeypatch.setattr(driven._processes, "find_dead", Mock(side_effect=[{1}, set()]))
    answered_steps(driven, 1)
    fail_snapshot(driven, MemoryError("no room"))
    assert driven.error is None
    await_told(capsys, "could not be copied")


def test_a_snapshot_that_fails_while_ray_cannot_say_who_is_alive_is_given_up(monkeypatch, capsys):
    driven = runtime(Recovery(every=2))
    monkeypatch.setattr(driven._processes, "find_dead", Mock(side_effect=RuntimeError("Ray cannot say")))
    answered_steps(driven, 1)
    fail_snapshot(driven, MemoryError("no room"))
    assert driven.error is None
    await_told(capsys, "could not be copied")


def snapshot_futures(driven):
    return [future for _, method, _, future in driven.attempts[-1].made if method == "Snapshot"]


def test_what_a_failed_snapshot_was_to_release_is_released_with_the_next_step():
    driven = runtime(Recovery(every=2))
    answered_steps(driven, 1)
    commit_snapshot(driven)
    answered_steps(driven, 1)
    driven.free((0, 1), 41)
    with driven.changed:
        driven._supervisor.snapshots.begin()
    fail_snapshot(driven, MemoryError())
    answered_steps(driven, 1)
    assert [each.handles for each in driven.journal._log[-1].released.values()] == [(41,), (41,)]


def test_without_any_snapshot_the_run_goes_on_as_long_as_the_log_may_grow():
    driven = runtime(Recovery(every=2))
    for count in (1, 2, 2, 2, 2):
        answered_steps(driven, count)
        assert driven.error is None
        fail_snapshot(driven, MemoryError("no room"))
    with pytest.raises(
        RuntimeError, match=r"not be copied 5 times in a row, .*no room.* fewer processes each"
    ):
        driven.step()[0].result(SOON)


def test_a_slow_snapshot_that_fails_when_the_log_is_full_does_not_end_the_run():
    driven = runtime(Recovery(every=2))
    answered_steps(driven, 8)  # more would wait for it
    fail_snapshot(driven, MemoryError("no room"))
    for count in (1, 2):
        answered_steps(driven, count)
        fail_snapshot(driven, MemoryError("no room"))
        assert driven.error is None
    answered_steps(driven, 2)
    fail_snapshot(driven, MemoryError("no room"))
    assert "4 times in a row" in str(driven.error)
