"""The runtime that recovers, with groups and processes that only pretend."""

import gc
import threading
import weakref
from concurrent.futures import Future
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from cluster.protocol.packing import PackedValue, pack
from cluster.recovery import moves as moves_module
from cluster.recovery.journal import BEGINNING
from cluster.recovery.rewinds import KeptHere, RewindRequest, Rewound
from mpmd.errors import (
    RecoveryError,
    StateLostError,
    StepAborted,
    TaskError,
)
from mpmd.ir.placement import Placement
from mpmd.runtime.argument_cache import PlacedPiece
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import Capture, Captured, CopyOut, Fetch, Read, StepReply, StepRequest, Write
from mpmd.runtime.survey import measured_peaks
from tests.support.pretended_groups import (
    SOON,
    TOGETHER,
    Calls,
    begin_recovery,
    end_recovery,
    runtime,
)


@pytest.fixture
def driven():
    return runtime()


def test_requests_that_cannot_be_sent_again_end_by_their_errors(driven, monkeypatch):
    futures = [*driven.step(inputs=(5,), donated=(5,)).values(), *driven.step().values()]
    monkeypatch.setattr(Calls, "ask_step", Mock(side_effect=RuntimeError("Ray was shut down")))
    driven.die(1)
    for future in futures:
        with pytest.raises(RuntimeError, match="Ray was shut down"):
            future.result(SOON)


OUT_OF_MEMORY = TaskError("out of memory", 0, "fwd_0__0")
LOST = LostValueError("out of memory")


def test_groups_go_back_when_a_step_fails_that_has_taken_its_inputs_over(driven):
    failing = driven.step(inputs=(1,), outputs=(2,), donated=(1,))
    driven.step(inputs=(2,), outputs=(3,))
    driven.step(inputs=(7,), outputs=(8,))
    calls = driven.attempts[0]
    calls.fail(0, OUT_OF_MEMORY, StepAborted("out of memory"))
    with pytest.raises(TaskError, match="out of memory"):
        failing[0].result(SOON)
    calls.fail(1, LOST, LOST)
    calls.reply(2)
    with driven.changed:
        assert driven.changed.wait_for(lambda: driven._processes.restored and driven._ledger.is_running, SOON)
    assert driven._processes.restored == [BEGINNING] and len(driven.attempts) == 1
    why = "out of memory. The MpmdArrays that the step was donated are as they were before it"
    assert calls.failed[3:] == [{why}, {why}, {None}], "nor is what reads the results run again"


def test_another_result_than_before_ends_the_run(driven):
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


def test_no_group_is_asked_for_a_value_from_before_a_loss(driven):
    driven._processes.failures = [TOGETHER]
    driven.last_checkpoint = "/checkpoints/300"
    old = driven.next_handle()
    driven.die(0)
    unmade = driven.next_handle()
    requests = {i: StepRequest(0, 0, (old,), (unmade,)) for i in range(2)}
    of_old_values = [
        driven.fetch(0, old),
        *driven.ask({0: Read({old: "stored"})}).values(),
        *driven.ask({0: CopyOut(driven.next_handle(), (old,))}).values(),
        *driven.ask({0: Write(old, [[]])}).values(),
        *driven.ask(requests).values(),
        *driven.step(inputs=(unmade,)).values(),
    ]
    for future in of_old_values:
        with pytest.raises(StateLostError, match=r"group 0 died\. The values of all groups are lost") as lost:
            future.result(SOON)
        assert lost.value.checkpoint == "/checkpoints/300" and "/checkpoints/300" in str(lost.value)
    assert driven.attempts[1].made == [] == driven.attempts[1].steps
    new = driven.next_handle()
    reading = driven.ask({0: Read({new: "stored"})})[0]
    driven.attempts[1].future("Read").set_result(StepReply({}))
    assert reading.result(SOON) == StepReply({})


def test_an_argument_that_groups_have_lost_is_sent_again(driven):
    driven._processes.failures = [TOGETHER]
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


def test_a_step_that_is_run_again_is_sent_the_same_arrays(driven):
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


@pytest.mark.parametrize("asked", [Read({5: "stored"}), Fetch(5)], ids=["read", "fetch"])
def test_an_interrupt_while_a_group_is_asked_keeps_no_later_error_waiting(driven, monkeypatch, asked):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(driven.attempts[0], "ask", interrupted)
        driven.ask({1: asked})
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


def test_who_waits_for_a_copy_to_be_written_is_told_when_it_is_freed(driven, monkeypatch):
    """By another thread: who frees it, such as the garbage collector, may hold any lock."""
    monkeypatch.setattr(moves_module, "_LOOK_SECONDS", 10.0 * SOON)
    monkeypatch.setattr(driven._supervisor.moves, "_look", lambda: None)
    driven._supervisor.moves.start()
    driven.ask({0: CopyOut(3, (1,))})
    freeing = threading.Timer(0.1, driven.free, ((0,), 3))
    freeing.start()
    with driven.changed:
        while driven._ledger.unwritten:
            assert driven.changed.wait(SOON), "nobody was told"
    freeing.join()
    driven.close()
    driven._supervisor.moves.looks.put(None)  # by which the thread ends


def test_the_status_says_which_groups_are_being_replaced(driven):
    driven.step()
    driven.fetch(0, 7)
    begin_recovery(driven, 1)
    zero, one = driven.status().processes
    assert (zero.state, zero.pending) == ("waits until others are replaced: group 1", 2)
    assert (one.state, one.pending) == ("being replaced: group 1 died", 1)
    assert measured_peaks(driven) == (None, None)
    end_recovery(driven)


def test_closing_fails_what_is_asked(driven):
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
