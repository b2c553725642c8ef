"""The runtime that recovers, with groups and a fleet that only pretend."""

import threading
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from cluster.driver import RayRuntime
from cluster.endpoint import endpoints
from cluster.fleet import CopiesLostError, Replacement
from cluster.process_info import ProcessInfo
from cluster.recovering_runtime import RecoveringRuntime
from cluster.recovery import Recovery
from cluster.watchdog import Limits
from mpmd.errors import GroupDiedError, RecoveryError, StateLostError, StepTimeoutError, TaskError
from mpmd.routes import Topology
from mpmd.runtime.journal import BEGINNING
from mpmd.runtime.requests import StepReply, StepRequest

SOON = 20


class Calls:
    """In place of ``ActorCalls``: the test answers the calls.

    ``sent`` are the host arrays of each step, for each process.
    """

    by_ray = False

    def __init__(self, processes):
        self.processes = processes
        self.made = []
        self.steps = []
        self.sent = []
        self.detached = None

    def call(self, number, method, *arguments):
        if self.detached is not None:
            raise self.detached
        self.made.append((number, method, arguments, Future()))
        return self.made[-1][-1]

    call_ray = call

    def call_step(self, step, arguments):
        futures = {number: Future() for number in arguments}
        self.steps.append((step, futures))
        self.sent.append({number: dict(packed) for number, (_, packed) in arguments.items()})
        for _, packed in arguments.values():
            packed.clear()  # as who runs the step does
        return dict(futures)

    def named(self, method):
        """The arguments of all calls of a method, with the process."""
        return [(number, *arguments) for number, name, arguments, _ in self.made if name == method]

    def future(self, method):
        """That of the last call of a method."""
        return [future for _, name, _, future in self.made if name == method][-1]

    def close(self):
        pass

    close_soon = close

    def detach(self, reason):
        self.detached = reason
        for *_, future in self.made:
            if not future.done():
                future.set_exception(reason)

    def reply(self, index, value=1.0):
        for future in self.steps[index][1].values():
            future.set_result(StepReply({7: np.float32(value)}))


class Fleet:
    """In place of the processes. ``failures`` are what the next replacements raise."""

    def __init__(self, failures=()):
        self.processes = endpoints([1, 1])
        self.infos = [ProcessInfo(i, 0, "host", "id", 100 + i, (), ()) for i in range(2)]
        self.actors = ()
        self.replacements = self
        self.stop = threading.Event()
        self.failures = list(failures)
        self.copied = []
        self.restored = []
        self.may_copy, self.may_replace = threading.Event(), threading.Event()
        self.may_replace.set()

    def replace_all(self, dead, loads, snapshot, watch, count_failure):
        assert self.may_replace.wait(SOON)
        lost = None
        while self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, CopiesLostError):
                snapshot, lost = BEGINNING, str(failure)
            else:
                count_failure(failure)
        self.restored.append(snapshot)
        return Replacement(frozenset(dead), [], lost)

    def copy_away(self, snapshot, base, is_wanted):
        assert self.may_copy.wait(SOON)
        self.copied.append((snapshot, base))

    def mark_committed(self):
        pass

    def start_spares(self):
        pass

    def release(self):
        pass


class Whole:
    """In place of ``HostArguments``: each process gets the whole arrays."""

    def packed(self, mpmd_idx, rank, request):
        return dict(request.host_arrays)


def groups_of(calls):
    groups = RayRuntime(calls, [None, None], Topology(()), "cpu", {})
    groups._arguments[0] = Whole()
    return groups


class Driven(RecoveringRuntime):
    """Has the calls of each attempt in ``attempts``."""

    def _calls(self, connections):
        self.attempts = [*getattr(self, "attempts", []), Calls(self._fleet.processes)]
        return self.attempts[-1]

    def step(self, host_arrays=None):
        return self.submit_step({i: StepRequest(0, 0, (), (), host_arrays or {}) for i in range(2)})

    def die(self, mpmd_idx):
        before = len(self.attempts)
        self._note_death(GroupDiedError(f"group {mpmd_idx} died", mpmd_idx))
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.attempts) > before or self._error is not None, SOON
            )


def runtime(recovery=None, failures=(), max_in_flight=16):
    recovery = recovery or Recovery(every=100)
    return Driven(Fleet(failures), [], Limits(), groups_of, recovery, lambda report: None, max_in_flight)


def begin_recovery(driven, mpmd_idx):
    """A group dies, and is not replaced before ``end_recovery``."""
    driven._fleet.may_replace.clear()
    driven._note_death(GroupDiedError(f"group {mpmd_idx} died", mpmd_idx))
    with driven._changed:
        assert driven._changed.wait_for(lambda: driven.attempts[-1].detached is not None, SOON)


def end_recovery(driven):
    count = len(driven.attempts)
    driven._fleet.may_replace.set()
    with driven._changed:
        assert driven._changed.wait_for(lambda: len(driven.attempts) > count, SOON)


def commit_snapshot(driven):
    """Ends the snapshot that the first step has begun."""
    driven._fleet.may_copy.set()
    for _, method, _, future in driven.attempts[-1].made:
        if method == "snapshot":
            future.set_result(None)
    with driven._changed:
        assert driven._changed.wait_for(lambda: driven._journal.snapshot is None, SOON)


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


def test_an_error_that_no_death_explains_is_given():
    driven = runtime()
    futures = driven.step()
    for future in driven.attempts[0].steps[0][1].values():
        future.set_exception(TaskError("out of memory", 0, "fwd_0__0"))
    with pytest.raises(TaskError, match="out of memory"):
        futures[1].result(SOON)


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
    driven = runtime(Recovery(every=100, max_failures=2), failures)
    for mpmd_idx in (0, 1, 0):
        driven.step()
        if driven._error is None:
            driven.die(mpmd_idx)
    with pytest.raises(RecoveryError, match="the groups have failed 3 times, and max_failures is 2"):
        driven.step()[0].result(SOON)
    assert str(driven._error).count("the last time because no room") == bool(failures)


TOGETHER = CopiesLostError("group 0 and group 1, which kept its values, have died together")


def test_values_of_which_no_copy_is_left_are_lost_and_the_mesh_goes_on():
    driven = runtime(failures=[TOGETHER])
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
    assert driven._fleet.restored == [BEGINNING]
    old = driven._first_handle - 1
    requests = {i: StepRequest(0, 0, (old,), (driven.next_handle(),)) for i in range(2)}
    of_old_values = [
        driven.fetch(0, old),
        driven.read(0, {old: "stored"}),
        driven.copy_out(0, driven.next_handle(), [old]),
        driven.write(0, old, [[]]),
        *driven.submit_step(requests).values(),
    ]
    for future in of_old_values:
        with pytest.raises(StateLostError):
            future.result(SOON)
    assert driven.attempts[1].made == [] == driven.attempts[1].steps, "groups are asked nothing of before"
    new = driven.next_handle()
    reading = driven.read(0, {new: "stored"})
    driven.attempts[1].future("read").set_result(StepReply({}))
    assert reading.result(SOON) == StepReply({})
    third = driven.step()
    driven.attempts[1].reply(0, 3.0)
    assert third[0].result(SOON).inline[7] == 3.0
    driven.die(1)
    assert driven._fleet.restored == [BEGINNING, BEGINNING]
    assert len(driven.attempts[2].steps) == 1
    assert driven.attempts[2].named("read") == [(0, {new: "stored"})]


def test_an_argument_that_groups_have_lost_is_sent_again():
    driven = runtime(failures=[TOGETHER])
    array = jax.numpy.arange(3.0)
    handles = []
    for _ in range(2):
        with driven.arguments.delivery(2) as delivery:
            assert delivery.find(array, (0, 1)) is None
            handles.append(delivery.send(np.asarray(array), (0, 1), array))
            delivery.commit([])
        with driven.arguments.delivery(2) as delivery:
            assert delivery.find(array, (0, 1)) == handles[-1]
        driven.die(0)
    assert handles[0] < handles[1]


def test_snapshots_commit_while_steps_run_and_late_ones_make_steps_wait():
    driven = runtime(Recovery(every=2))
    futures = [driven.step()]
    calls = driven.attempts[0]
    copying = [future for _, method, _, future in calls.made if method == "snapshot"]
    assert len(copying) == 2
    futures += [driven.step() for _ in range(7)]
    for index in range(8):
        calls.reply(index)
    submitted = threading.Event()
    threading.Thread(target=lambda: (driven.step(), submitted.set()), daemon=True).start()
    assert not submitted.wait(0.1)
    for future in copying:
        future.set_result(None)
    driven._fleet.may_copy.set()
    assert submitted.wait(SOON)
    assert driven._fleet.copied == [(1, 0)]
    driven.die(0)
    assert driven._fleet.restored == [1]
    assert len(driven.attempts[1].steps) == 8  # the first one is in the snapshot


def test_an_interrupt_while_copies_are_asked_for_leaves_no_snapshot_waiting(monkeypatch):
    driven = runtime(Recovery(every=2))
    driven.step()
    driven.attempts[0].reply(0)
    driven._fleet.may_copy.set()
    for _, _, _, copied in driven.attempts[0].made:
        copied.set_result(None)
    with driven._changed:
        assert driven._changed.wait_for(lambda: driven._journal.committed == 1, SOON)
    driven.step()
    call, calls = driven.attempts[0].call, driven.attempts[0]

    def interrupted(number, *arguments):
        if number == 1:
            raise KeyboardInterrupt
        return call(number, *arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(calls, "call", interrupted)
        driven.step()
    assert driven._journal.snapshot is None
    driven.step()
    assert driven._journal.snapshot is not None  # another one


def test_values_that_are_asked_for_while_groups_recover_are_answered_then():
    driven = runtime()
    driven.step()
    driven.attempts[0].reply(0)
    begin_recovery(driven, 0)
    assert driven.is_recovering
    value = driven.fetch(1, 7)
    end_recovery(driven)
    assert driven.attempts[1].named("fetch") == [(1, 7)]
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


def test_what_was_read_from_a_checkpoint_is_read_again_unless_a_snapshot_has_it():
    driven = runtime()
    futures = [driven.read(i, {5: "stored"}) for i in range(2)]
    driven.attempts[0].future("read").set_result(StepReply({}))
    assert futures[1].result(SOON) == StepReply({})
    driven.die(0)
    assert driven.attempts[1].named("read") == [(i, {5: "stored"}) for i in range(2)]
    assert not futures[0].done()
    for _, _, _, future in driven.attempts[1].made:
        future.set_result(StepReply({}))
    assert futures[0].result(SOON) == StepReply({})
    driven.step()
    driven.attempts[1].reply(0)
    commit_snapshot(driven)
    driven.die(1)
    assert driven._fleet.restored == [0, 1]
    assert driven.attempts[2].named("read") == []


def test_reading_waits_while_groups_recover():
    driven = runtime()
    begin_recovery(driven, 0)
    asked = threading.Event()
    reading = threading.Thread(target=lambda: (driven.read(1, {5: "stored"}), asked.set()))
    reading.start()
    assert not asked.wait(0.1)
    end_recovery(driven)
    assert asked.wait(SOON)
    assert driven.attempts[1].named("read") == [(1, {5: "stored"})]
    reading.join()


def test_a_checkpoint_that_is_gone_when_it_is_read_again_ends_the_run():
    driven = runtime()
    driven.read(1, {5: "stored"})
    driven.attempts[0].future("read").set_result(StepReply({}))
    driven.die(0)
    driven.attempts[1].future("read").set_exception(ValueError("no such file"))
    with pytest.raises(
        RecoveryError, match=r"reading from storage failed on group 1 .*: no such file\. .*checkpoint on disk"
    ):
        driven.read(0, {6: "stored"}).result(SOON)


@pytest.mark.parametrize(
    "ask", [lambda d: d.read(1, {5: "stored"}), lambda d: d.fetch(1, 5)], ids=["read", "fetch"]
)
def test_an_interrupt_while_a_group_is_asked_keeps_no_later_error_waiting(monkeypatch, ask):
    driven = runtime()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(driven.attempts[0], "call", interrupted)
        ask(driven)
    futures = driven.step()
    for future in driven.attempts[0].steps[0][1].values():
        future.set_exception(TaskError("out of memory", 0, "fwd_0__0"))
    with pytest.raises(TaskError, match="out of memory"):
        futures[0].result(SOON)


def copied(driven, mpmd_idx, copy=3):
    """A group has copied a value."""
    future = driven.copy_out(mpmd_idx, copy, [1])
    driven.attempts[-1].future("copy_out").set_result(None)
    assert future.result(SOON) is None


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
    assert calls.named("copy_out") == [(0, 3, (1,))]
    assert calls.named("write") == [], "not before the copy is there"
    calls.future("copy_out").set_result(None)
    assert calls.named("write") == [(0, 3, ["spec"])]
    assert not writing.done()
    calls.future("write").set_result(16)
    assert writing.result(SOON) == [16]
    driven.die(0)
    assert driven.attempts[2].named("copy_out") == [], "it is written"


def test_a_copy_that_is_freed_is_not_made_again():
    driven = runtime()
    copied(driven, 0)
    driven.free((0,), 3)
    driven.step()
    driven.die(1)
    assert driven.attempts[1].named("copy_out") == []


def test_a_snapshot_waits_for_what_is_being_saved_and_a_step_does_not():
    driven = runtime(Recovery(every=2))
    copied(driven, 0)
    driven.step()
    driven.attempts[0].reply(0)
    driven._fleet.may_copy.set()
    for future in [future for _, method, _, future in driven.attempts[0].made if method == "snapshot"]:
        future.set_result(None)
    with driven._changed:
        assert driven._changed.wait_for(lambda: driven._journal.snapshot.is_copied, SOON)
    assert driven._journal.committed == BEGINNING
    for index in range(1, 9):  # with the last one the log is too long, and the copy is given up
        assert driven._journal.committed == BEGINNING
        driven.step()
        driven.attempts[0].reply(index)
    assert driven._journal.committed == 1
    writing = driven.write(0, 3, [["spec"]])
    begin_recovery(driven, 1)
    for future in (writing, driven.write(0, 3, [["spec"]])):
        with pytest.raises(GroupDiedError, match="group 1 died"):
            future.result(SOON)
    end_recovery(driven)
    assert driven.attempts[1].named("copy_out") == []


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
    with pytest.raises(RuntimeError, match="the cluster mesh is closed"):
        writing.result(SOON)


def test_the_status_says_which_groups_are_being_replaced():
    driven = runtime()
    driven.step()
    driven.fetch(0, 7)
    begin_recovery(driven, 1)
    zero, one = driven.status().processes
    assert (zero.state, zero.pending) == ("waits until others are replaced: group 1", 2)
    assert (one.state, one.pending) == ("being replaced: group 1 died", 1)
    assert driven.measured_peaks() == (None, None)
    end_recovery(driven)


def test_closing_fails_what_is_asked():
    driven = runtime()
    futures, value = driven.step(), driven.fetch(0, 1)
    driven.close()
    for future in (*futures.values(), value, *driven.step().values(), driven.fetch(0, 1)):
        with pytest.raises(RuntimeError, match="the cluster mesh is closed"):
            future.result(SOON)
