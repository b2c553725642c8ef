"""The runtime that asks groups again what they were to read from storage, and to save."""

import threading
import time

import pytest

from cluster.recovery import Recovery
from cluster.recovery.journal import BEGINNING
from mpmd.errors import GroupDiedError, RecoveryError, StateLostError, StepAborted, TaskError
from mpmd.runtime.requests import StepReply
from tests.support.pretended_groups import (
    SOON,
    TOGETHER,
    begin_recovery,
    commit_snapshot,
    end_recovery,
    runtime,
)


def test_what_was_read_from_a_checkpoint_is_read_again_unless_a_snapshot_has_it():
    driven = runtime(Recovery(every=100))
    futures = [driven.read(i, {5: "stored"}) for i in range(2)]
    driven.attempts[0].future("Read").set_result(StepReply({}))
    assert futures[1].result(SOON) == StepReply({})
    driven.die(0)
    assert driven.attempts[1].named("Read") == [(i, {5: "stored"}) for i in range(2)]
    assert not futures[0].done()
    for _, _, _, future in driven.attempts[1].made:
        future.set_result(StepReply({}))
    assert futures[0].result(SOON) == StepReply({})
    driven.step()
    driven.attempts[1].reply(0)
    commit_snapshot(driven)
    driven.die(1)
    assert driven._processes.restored == [0, 1]
    assert driven.attempts[2].named("Read") == []


def test_reading_waits_while_groups_recover():
    driven = runtime()
    begin_recovery(driven, 0)
    asked = threading.Event()
    reading = threading.Thread(target=lambda: (driven.read(1, {5: "stored"}), asked.set()))
    reading.start()
    assert not asked.wait(0.1)
    end_recovery(driven)
    assert asked.wait(SOON)
    assert driven.attempts[1].named("Read") == [(1, {5: "stored"})]
    reading.join()


def test_a_checkpoint_that_is_gone_when_it_is_read_again_ends_the_run():
    driven = runtime()
    driven.read(1, {5: "stored"})
    driven.attempts[0].future("Read").set_result(StepReply({}))
    driven.die(0)
    driven.attempts[1].future("Read").set_exception(ValueError("no such file"))
    with pytest.raises(
        RecoveryError, match=r"reading from storage failed on group 1 .*: no such file\. .*checkpoint on disk"
    ):
        driven.read(0, {6: "stored"}).result(SOON)


def copied(driven, mpmd_idx, copy=3):
    """A group has copied a value."""
    future = driven.copy_out(mpmd_idx, copy, [1])
    driven.attempts[-1].future("CopyOut").set_result(None)
    assert future.result(SOON) is None


def test_a_write_that_succeeds_after_all_groups_went_back_counts_whoever_asked_for_it():
    """The first write was queued behind another one, and has written the second copy."""
    driven = runtime(Recovery(every=100))
    calls = driven.attempts[0]
    driven.step()
    calls.reply(0)
    commit_snapshot(driven)
    driven.copy_out(0, 50, (7,))
    calls.future("CopyOut").set_result(None)
    written = driven.write(0, 50, [[]])
    first = calls.future("Write")
    driven.step(inputs=(7,), donated=(7,))
    calls.fail(1, TaskError("x", 0, "f"), StepAborted("x"))
    deadline = time.monotonic() + SOON
    while len(calls.named("CopyOut")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    calls.future("CopyOut").set_result(None)
    while len(calls.named("Write")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.set_result([1])
    calls.future("Write").set_exception(RuntimeError("the copy is gone"))
    assert written.exception(SOON) is None
    driven.close()


@pytest.mark.parametrize("asked", ["copied", "written"])
def test_what_is_being_saved_is_copied_and_written_again_after_a_death(asked):
    driven = runtime()
    copied(driven, 0)
    driven.step()
    if asked == "written":
        writing = driven.write(0, 3, [["spec"]])
    begin_recovery(driven, 1)
    if asked == "copied":
        writing = driven.write(0, 3, [["spec"]])
    end_recovery(driven)
    calls = driven.attempts[1]
    assert calls.named("CopyOut") == [(0, 3, (1,))]
    assert calls.named("Write") == [], "not before the copy is there"
    calls.future("CopyOut").set_result(None)
    assert calls.named("Write") == [(0, 3, [["spec"]])]
    assert not writing.done()
    calls.future("Write").set_result(16)
    assert writing.result(SOON) == [16]
    driven.die(0)
    assert driven.attempts[2].named("CopyOut") == [], "it is written"


def test_a_copy_that_is_freed_is_not_made_again():
    driven = runtime()
    copied(driven, 0)
    driven.free((0,), 3)
    driven.step()
    driven.die(1)
    assert driven.attempts[1].named("CopyOut") == []


def test_a_snapshot_waits_for_what_is_being_saved_and_a_step_does_not():
    driven = runtime(Recovery(every=2))
    copied(driven, 0)
    driven.step()
    driven.attempts[0].reply(0)
    driven._processes.may_copy.set()
    with driven.changed:
        assert driven.changed.wait_for(lambda: driven.journal.snapshot is not None, SOON)
    for future in [future for _, method, _, future in driven.attempts[0].made if method == "Snapshot"]:
        future.set_result(None)
    with driven.changed:
        assert driven.changed.wait_for(lambda: driven.journal.snapshot.is_copied, SOON)
    assert driven.journal.committed == BEGINNING
    for index in range(1, 9):  # with the last one the log is too long, and the copy is given up
        assert driven.journal.committed == BEGINNING
        driven.step()
        driven.attempts[0].reply(index)
    assert driven.journal.committed == 1
    writing = driven.write(0, 3, [["spec"]])
    begin_recovery(driven, 1)
    for future in (writing, driven.write(0, 3, [["spec"]])):
        with pytest.raises(GroupDiedError, match="group 1 died"):
            future.result(SOON)
    end_recovery(driven)
    assert driven.attempts[1].named("CopyOut") == []


def test_saving_fails_when_values_are_lost_or_the_run_ends():
    driven = runtime(failures=[TOGETHER])
    copied(driven, 0)
    writing = driven.write(0, 3, [["spec"]])
    driven.die(1)
    with pytest.raises(StateLostError):
        writing.result(SOON)
    copy = driven.next_handle()
    copied(driven, 0, copy)
    writing = driven.write(0, copy, [["spec"]])
    driven.close()
    with pytest.raises(RuntimeError, match="the mesh was closed"):
        writing.result(SOON)
