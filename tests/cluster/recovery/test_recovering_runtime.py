"""The runtime that recovers, with groups and processes that only pretend."""

import gc
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from cluster.protocol.packing import PackedValue, pack
from cluster.recovery import Recovery
from cluster.recovery.journal import BEGINNING
from cluster.recovery.rewinds import KeptHere, RewindRequest, Rewound
from mpmd.errors import (
    RecoveryError,
    StateLostError,
    StepAborted,
    StepTimeoutError,
    TaskError,
)
from mpmd.ir.placement import Placement
from mpmd.runtime.argument_cache import PlacedPiece
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import Analyses, Capture, Captured, StepReply, StepRequest
from mpmd.runtime.survey import measured_peaks
from tests.support.pretended_groups import (
    SOON,
    TOGETHER,
    Calls,
    Driven,
    Processes,
    WithoutSnapshots,
    begin_recovery,
    commit_snapshot,
    end_recovery,
    runtime,
)


def test_steps_are_asked_again_and_futures_end_as_if_nothing_had_happened():
    driven = runtime()
    first, second = driven.step(), driven.step()
    driven.attempts[0].reply(0)
    driven.attempts[0].steps[1][1][0].set_exception(TaskError("a message was lost", 0, "fwd_0__0"))
    assert first[0].result(SOON).inline[7] == 1.0
    assert not second[0].done()  # it may be a consequence of a death
    driven.die(1)
    again = driven.attempts[1].steps
    numbers = [number for calls in driven.attempts for number, _ in calls.steps]
    assert numbers == sorted(set(numbers)), "groups refuse the number of an earlier step"
    assert len(again) == 2
    driven.attempts[1].reply(0)
    driven.attempts[1].reply(1, 2.0)
    assert [future.result(SOON).inline[7] for future in second.values()] == [2.0, 2.0]


def test_requests_that_cannot_be_sent_again_end_by_their_errors(monkeypatch):
    driven = runtime()
    futures = [*driven.step(inputs=(5,), donated=(5,)).values(), *driven.step().values()]
    monkeypatch.setattr(Calls, "ask_step", Mock(side_effect=RuntimeError("Ray was shut down")))
    driven.die(1)
    for future in futures:
        with pytest.raises(RuntimeError, match="Ray was shut down"):
            future.result(SOON)


def test_an_error_that_no_death_explains_is_given():
    driven = runtime()
    futures = driven.step()
    for future in driven.attempts[0].steps[0][1].values():
        future.set_exception(TaskError("out of memory", 0, "fwd_0__0"))
    with pytest.raises(TaskError, match="out of memory"):
        futures[1].result(SOON)


OUT_OF_MEMORY = TaskError("out of memory", 0, "fwd_0__0")
LOST = LostValueError("out of memory")


def wait_until_back(driven, count):
    """Groups have gone back so many times; the copies of the snapshot under way do not matter any more."""
    for _, method, _, future in driven.attempts[-1].made:
        if method == "Snapshot" and not future.done():
            future.set_result(None)
    driven._processes.may_copy.set()
    with driven.changed:
        assert driven.changed.wait_for(
            lambda: len(driven._processes.restored) == count and driven._ledger.is_running, SOON
        )


def test_groups_go_back_when_a_step_fails_that_has_taken_its_inputs_over():
    driven = runtime()
    first = driven.step(inputs=(1,), outputs=(2,), donated=(1,))
    second = driven.step(inputs=(2,), outputs=(3,), donated=(2,))
    reading = driven.step(inputs=(3,), outputs=(4,))
    other = driven.step(inputs=(7,), outputs=(8,))
    calls = driven.attempts[0]
    calls.reply(0)
    calls.steps[2][1][0].set_result(StepReply({4: np.float32(1)}))  # the group's own part went well
    assert reading[0].result(SOON).inline
    calls.fail(1, OUT_OF_MEMORY, StepAborted("out of memory"))
    with pytest.raises(TaskError, match="out of memory"):
        second[0].result(SOON)
    assert not driven._ledger.is_running and driven._processes.restored == [], "groups answer all before"
    calls.steps[2][1][1].set_exception(LOST)
    calls.reply(3)
    wait_until_back(driven, 1)
    assert driven._processes.restored == [BEGINNING] and len(driven.attempts) == 1
    why = "out of memory. The MpmdArrays that the step was donated are as they were before it"
    assert calls.failed[4:] == [{None}, {why}, {why}, {None}], "nor is what reads the results"
    calls.reply(4)
    for index in (5, 6):
        calls.fail(index, LOST, LOST)
    calls.reply(7)
    with pytest.raises(LostValueError):
        reading[1].result(SOON)
    assert other[0].result(SOON).inline and first[0].result(SOON).inline
    third = driven.step(inputs=(2,), outputs=(5,), donated=(2,))
    calls.reply(8)
    assert third[0].result(SOON).inline
    driven.die(1)
    assert [len(failed) for failed in driven.attempts[1].failed] == [1] * 5
    assert driven.attempts[1].failed[4] == {None}
    assert driven.error is None


def test_deaths_count_and_failed_steps_do_not():
    reports = []
    driven = Driven(Processes(), WithoutSnapshots(every=100, max_failures=1), reports.append)
    (calls,) = driven.attempts
    for count in (1, 2, 3):
        driven.step(inputs=(1,), outputs=(2,), donated=(1,))
        calls.fail(-1, OUT_OF_MEMORY, OUT_OF_MEMORY)
        wait_until_back(driven, count)
        for index in range(-count, 0):
            calls.fail(index, LOST, LOST)
    driven.step()
    driven.die(0)
    assert driven.error is None
    assert [(report.kind, report.mpmd_idxs) for report in reports[:1]] == [("failed", ())]


@pytest.mark.parametrize(
    ("donated", "errors"),
    [((), [OUT_OF_MEMORY, OUT_OF_MEMORY]), ((1,), [LOST, LOST])],
    ids=["nothing donated", "before inputs were taken"],
)
def test_groups_stay_when_a_failed_step_has_taken_nothing_over(donated, errors):
    driven = runtime()
    futures = driven.step(inputs=(1,), outputs=(2,), donated=donated)
    driven.attempts[0].fail(0, *errors)
    with pytest.raises(type(errors[0])):
        futures[0].result(SOON)
    assert not driven.is_recovering
    assert len(driven.attempts) == 1


def test_another_result_than_before_ends_the_run():
    driven = runtime()
    futures = driven.step()
    driven.attempts[0].reply(0, 1.0)
    futures[0].result(SOON)
    waiting = driven.fetch(0, 3)
    driven.die(0)
    driven.attempts[1].reply(0, 1.5)
    with pytest.raises(RecoveryError, match=r"step 1 gave another result on group 0.*checkpoint on disk"):
        waiting.result(SOON)
    with pytest.raises(RecoveryError, match="step 1 gave another result"):
        driven.step()[0].result(SOON)
    with pytest.raises(RecoveryError, match="step 1 gave another result"):
        driven.load(None)


def test_a_step_that_kills_twice_ends_the_run():
    driven = runtime()
    driven.step()
    driven.die(1)
    driven.die(1)
    with pytest.raises(RecoveryError, match="step 1 has ended the process of group 1 twice"):
        driven.step()[0].result(SOON)


@pytest.mark.parametrize("failures", [[], [RuntimeError("no room")] * 9], ids=["deaths", "no room"])
def test_after_so_many_failures_the_run_ends(failures):
    driven = runtime(WithoutSnapshots(every=100, max_failures=2), failures)
    for mpmd_idx in (0, 1, 0):
        driven.step()
        if driven.error is None:
            driven.die(mpmd_idx)
    with pytest.raises(RecoveryError, match="the groups have failed 3 times, and max_failures is 2"):
        driven.step()[0].result(SOON)
    assert str(driven.error).count("the last time because no room") == bool(failures)


def test_values_of_which_no_copy_is_left_are_lost_and_the_mesh_goes_on():
    driven = runtime(Recovery(every=100), failures=[TOGETHER])
    driven.last_checkpoint = "/checkpoints/300"
    first = driven.step()
    driven.attempts[0].reply(0)
    commit_snapshot(driven)
    second, value = driven.step(), driven.fetch(1, 7)
    driven.die(0)
    assert first[0].result(SOON).inline[7] == 1.0, "what was given stays"
    for future in (*second.values(), value):
        with pytest.raises(
            StateLostError, match=r"group 0 died\. The values of all groups are lost"
        ) as caught:
            future.result(SOON)
        assert "have died together" in str(caught.value)
        assert "/checkpoints/300" in str(caught.value)
        assert caught.value.checkpoint == "/checkpoints/300"
    assert driven._processes.restored == [BEGINNING]
    old = driven._ledger._lost_before[0][0] - 1
    unmade = driven.next_handle()
    requests = {i: StepRequest(0, 0, (old,), (unmade,)) for i in range(2)}
    of_old_values = [
        driven.fetch(0, old),
        driven.read(0, {old: "stored"}),
        driven.copy_out(0, driven.next_handle(), [old]),
        driven.write(0, old, [[]]),
        *driven.ask(requests).values(),
        *driven.step(inputs=(unmade,)).values(),
    ]
    for future in of_old_values:
        with pytest.raises(StateLostError):
            future.result(SOON)
    assert driven.attempts[1].made == [] == driven.attempts[1].steps, "groups are asked nothing of before"
    new = driven.next_handle()
    reading = driven.read(0, {new: "stored"})
    driven.attempts[1].future("Read").set_result(StepReply({}))
    assert reading.result(SOON) == StepReply({})
    third = driven.step()
    driven.attempts[1].reply(0, 3.0)
    assert third[0].result(SOON).inline[7] == 3.0
    driven.die(1)
    assert driven._processes.restored == [BEGINNING, BEGINNING]
    assert len(driven.attempts[2].steps) == 1
    assert driven.attempts[2].named("Read") == [(0, {new: "stored"})]


def test_an_argument_that_groups_have_lost_is_sent_again():
    driven = runtime(failures=[TOGETHER])
    array = jax.numpy.arange(3.0)
    piece = PlacedPiece(array, "", Placement((0, 1)))
    handles = []
    for _ in range(2):
        with driven.arguments.delivery((0, 1)) as delivery:
            assert delivery.find(piece) is None
            handles.append(delivery.send(np.asarray(array), piece.placement, piece))
            delivery.commit([])
        with driven.arguments.delivery((0, 1)) as delivery:
            assert delivery.find(piece) == handles[-1]
        driven.die(0)
    assert handles[0] < handles[1]


def test_values_that_are_asked_for_while_groups_recover_are_answered_then():
    driven = runtime()
    driven.step()
    driven.attempts[0].reply(0)
    begin_recovery(driven, 0)
    assert driven.is_recovering
    value = driven.fetch(1, 7)
    end_recovery(driven)
    assert driven.attempts[1].named("Fetch") == [(1, 7)]
    assert not value.done()


def test_a_step_that_is_run_again_is_sent_the_same_arrays():
    driven = runtime()
    array = np.arange(3.0)
    driven.step({9: array})
    driven.attempts[0].reply(0)
    driven.die(1)
    for calls in driven.attempts:
        assert [sent[9] is array for sent in calls.sent[0].values()] == [True, True]


def test_a_driver_that_is_as_far_ahead_as_it_may_be_goes_on_after_a_recovery():
    driven = runtime(max_in_flight=1)
    driven.in_flight.enter()
    driven.in_flight.leave_after(driven.step().values())
    entered = threading.Event()
    waiting = threading.Thread(target=lambda: (driven.in_flight.enter(), driven.step(), entered.set()))
    waiting.start()
    begin_recovery(driven, 1)
    assert not entered.wait(0.1)
    end_recovery(driven)
    driven.attempts[1].reply(0)
    assert entered.wait(SOON)
    assert len(driven.attempts[1].steps) == 2
    waiting.join()


def test_the_driver_waits_for_a_recovery_before_it_submits_a_step():
    """There an interrupt ends the wait."""
    driven, waited = runtime(), threading.Event()
    begin_recovery(driven, 1)
    waiting = threading.Thread(target=lambda: (driven.wait_to_submit([0, 1]), waited.set()))
    waiting.start()
    assert not waited.wait(0.1)
    end_recovery(driven)
    assert waited.wait(SOON)
    waiting.join()


def test_a_repetition_that_takes_too_long_ends_the_run_and_says_so():
    driven = runtime()
    driven.step()
    driven.attempts[0].reply(0)
    driven.die(1)
    late = StepTimeoutError("step 2 has taken longer than step_timeout=5 s, and was ended")
    for future in driven.attempts[1].steps[0][1].values():
        future.set_exception(late)
    with pytest.raises(
        RecoveryError, match=r"step 1 failed on group 0 .*: step 2 has taken longer"
    ) as caught:
        driven.step()[0].result(SOON)
    assert caught.value.__cause__ is late


@pytest.mark.parametrize(
    "ask", [lambda d: d.read(1, {5: "stored"}), lambda d: d.fetch(1, 5)], ids=["read", "fetch"]
)
def test_an_interrupt_while_a_group_is_asked_keeps_no_later_error_waiting(monkeypatch, ask):
    driven = runtime()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(driven.attempts[0], "ask", interrupted)
        ask(driven)
    futures = driven.step()
    for future in driven.attempts[0].steps[0][1].values():
        future.set_exception(TaskError("out of memory", 0, "fwd_0__0"))
    with pytest.raises(TaskError, match="out of memory"):
        futures[0].result(SOON)


def test_an_interrupt_right_after_a_rewind_has_groups_drop_the_tasks_that_they_kept(monkeypatch):
    driven, waits = runtime(), iter([True])
    rewinds = driven._supervisor.rewinds
    captured = Captured(Capture(None, 99), 1, "fwd_0__0", "fwd_0__0", 0, (), "cpu", "cpu", {})

    def wait_for(condition):
        if not next(waits, False):
            rewinds.settle(Rewound(kept=[KeptHere(1, 0, captured, ValueError())]))
            raise KeyboardInterrupt

    monkeypatch.setattr(driven._ledger, "wake", lambda: None)
    monkeypatch.setattr(driven._ledger, "wait_for", wait_for)
    with pytest.raises(KeyboardInterrupt):
        rewinds.find(None)
    assert driven._released.take(1).handles == (99,)


def test_the_end_of_a_rewind_is_kept_by_its_caller_alone():
    ended, driven = Future(), runtime()
    gc.disable()
    try:
        with driven.changed:
            driven._supervisor.rewinds.asked = RewindRequest(None, ended)
            driven._supervisor.rewinds.settle(Rewound())
        kept = weakref.ref(ended)
        assert ended.result() == Rewound()
        del ended
        assert kept() is None
    finally:
        gc.enable()


def test_the_status_says_which_groups_are_being_replaced():
    driven = runtime()
    driven.step()
    driven.fetch(0, 7)
    begin_recovery(driven, 1)
    zero, one = driven.status().processes
    assert (zero.state, zero.pending) == ("waits until others are replaced: group 1", 2)
    assert (one.state, one.pending) == ("being replaced: group 1 died", 1)
    assert measured_peaks(driven) == (None, None)
    end_recovery(driven)


def test_closing_fails_what_is_asked():
    driven = runtime()
    futures, value = driven.step(), driven.fetch(0, 1)
    driven.close()
    for future in (*futures.values(), value, *driven.step().values(), driven.fetch(0, 1)):
        with pytest.raises(RuntimeError, match="the mesh was closed"):
            future.result(SOON)


def test_groups_end_with_the_last_reference_to_their_runtime():
    """And not when garbage is collected: none of its parts refers to a later one."""
    driven = runtime()
    value = driven.fetch(0, 7)
    driven.attempts[0].future("Fetch").set_result(PackedValue((), ((None, pack(np.array(2.0))),)))
    assert value.result(SOON) == 2.0
    driven.attempts[0].made.clear()  # which refers to who was told of the reply
    groups = weakref.ref(driven._groups)
    del driven
    assert groups() is None


def test_analyses_are_asked_of_groups_that_have_been_replaced():
    driven = runtime()
    begin_recovery(driven, 1)

    def analyses():
        return [each.result(SOON) for each in driven.ask(dict.fromkeys((0, 1), Analyses(0))).values()]

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(analyses)
        assert not wait([asking], timeout=0.1).done
        end_recovery(driven)
        calls = driven.attempts[1]
        while len(calls.named("Analyses")) < 2:
            assert not wait([asking], timeout=0.01).done
        for group, (_, method, _, future) in enumerate(calls.made):
            assert method == "Analyses"
            future.set_result({f"fwd_{group}": ()})
        assert asking.result(SOON) == [{"fwd_0": ()}, {"fwd_1": ()}]


def test_a_fault_in_what_follows_a_recovery_ends_the_run_and_not_the_thread_alone(monkeypatch):
    driven, ended = runtime(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())
    (waiting, _) = driven.step().values()

    def attach(connections):
        raise OSError("no descriptors are left")

    monkeypatch.setattr(driven._supervisor, "attach", attach)
    driven.die(1)
    for failed in (waiting, driven.step()[0], driven.fetch(0, 3)):
        with pytest.raises(RuntimeError, match=r"cannot be looked after: OSError.*no descriptors are left"):
            failed.result(SOON)
    assert ended.wait(SOON) and driven._processes.is_released
