"""When a group counts as dead, when a step or a task takes too long, and the errors that say so."""

import pytest

from cluster.driver.calls.liveness import (
    ANSWER_SECONDS,
    DEATH_REPORT_SECONDS,
    DIVIDED_SECONDS,
    LEAVE_SECONDS,
    PING_SECONDS,
    UNRESPONSIVE_SECONDS,
    Liveness,
    TimeLimits,
)
from cluster.driver.calls.pending_calls import PendingCalls
from cluster.driver.status import ProcessesStatus, ProcessStatus
from cluster.protocol.process_info import ProcessInfo
from mpmd.errors import GroupDiedError, GroupStuckError, StepAborted, StepTimeoutError, TaskError
from mpmd.runtime.activity import ActivityKind, Doing
from tests.support.processes import endpoints

TWO = endpoints([1, 1])
WAITS = Doing("waiting for message 2 of group 1", 7, ActivityKind.OTHER, 33.0)
RUNS = Doing("running bwd_1__3", 7, ActivityKind.TASK, 34.0)
COMPILES = Doing("compiling fwd_1", None, ActivityKind.LOAD, 90.0)


@pytest.fixture
def pending():
    return PendingCalls()


def liveness_of(pending, processes=TWO, **limits):
    return Liveness(processes, TimeLimits(**limits), pending)


def deaths(liveness, now):
    return list(liveness.deaths(now))


def test_a_disconnected_group_is_reported_once_after_a_time_for_ray_to_say_why(pending):
    liveness = liveness_of(pending)
    liveness.mark_disconnected(1, "", 100.0)
    liveness.mark_disconnected(1, ": MemoryError: too large", 101.0)
    assert deaths(liveness, 100.0 + DEATH_REPORT_SECONDS - 0.1) == []
    (error,) = deaths(liveness, 100.0 + DEATH_REPORT_SECONDS)
    assert error.mpmd_idx == 1
    assert str(error) == ("group 1 is gone: its connection to the driver has ended: MemoryError: too large")
    assert deaths(liveness, 1000.0) == []


def test_groups_that_answer_are_pinged_again_while_a_reply_is_awaited(pending):
    liveness = liveness_of(pending)
    assert liveness.pings(99.0) == []
    pending.add(TWO)
    assert liveness.pings(100.0) == [0, 1]
    assert liveness.pings(100.0 + PING_SECONDS - 0.1) == []
    liveness.mark_answered(0, None, 110.0)
    assert liveness.pings(100.0 + PING_SECONDS) == [0]


@pytest.mark.parametrize("limits", [{}, {"stuck_after": 20}])
def test_a_group_that_leaves_a_ping_unanswered_is_unresponsive(pending, limits):
    """Also where limits have groups pinged more often than every ``PING_SECONDS``."""
    pending.add(TWO, step=7)
    places = ["node 10.0.0.1, pid 12", "node 10.0.0.2, pid 5"]
    liveness = Liveness(TWO, TimeLimits(**limits), pending, places)
    for now in range(100, 160):
        assert liveness.late_steps(now) == deaths(liveness, now) == []
        if 1 in liveness.pings(now):
            liveness.mark_answered(1, WAITS, now)
    (error,) = deaths(liveness, 100.0 + UNRESPONSIVE_SECONDS)
    assert error.mpmd_idx == 0
    assert str(error) == "group 0 is stuck: its process has not answered for 60 s (node 10.0.0.1, pid 12)"


def test_a_group_of_several_processes_is_dead_with_the_first_of_them(pending):
    liveness = liveness_of(pending, endpoints([1, 2]))
    liveness.mark_disconnected(2, "", 100.0)
    liveness.mark_disconnected(1, "", 100.1)
    assert not liveness.disconnected_first(1)
    assert liveness.disconnected_first(2) and liveness.disconnected_first(0)
    first, second = deaths(liveness, 100.2 + DEATH_REPORT_SECONDS)
    assert str(first).startswith("group 1, process 1 is gone") and first.mpmd_idx == second.mpmd_idx == 1


def test_a_failed_collective_is_believed_only_after_the_time_to_report_a_death(pending):
    liveness = liveness_of(pending, endpoints([2, 1]))
    liveness.mark_broken(0, "Gloo all-reduce failed", 100.0)
    liveness.mark_disconnected(1, "", 100.5)
    (error,) = deaths(liveness, 100.5 + DEATH_REPORT_SECONDS)
    assert str(error) == "group 0, process 1 is gone: its connection to the driver has ended"
    (error,) = deaths(liveness, 200.0)
    assert (
        "group 0 has failed as a whole: its processes have lost one another; process 0 reports: Gloo"
        in str(error)
    )
    assert deaths(liveness, 300.0) == []


def test_a_process_that_does_not_follow_another_one_out_of_a_failed_step_is_dead(pending):
    processes = endpoints([2])
    (left, _) = pending.add(processes, step=7)
    pending.fail(left, TaskError("fwd_0__0 failed", 0, "fwd_0__0"))
    liveness = liveness_of(pending, processes)
    assert deaths(liveness, 100.0) == deaths(liveness, 99.9 + DIVIDED_SECONDS) == []
    (error,) = deaths(liveness, 100.0 + DIVIDED_SECONDS)
    assert error.mpmd_idx == 0 and "The step has failed because fwd_0__0 failed" in str(error)
    assert deaths(liveness, 101.0 + DIVIDED_SECONDS) == []


def test_a_late_step_is_ended_once_and_its_processes_are_asked_before(pending):
    liveness = liveness_of(pending, step_timeout=30)
    pending.add(TWO, step=7, ordinal=3)
    assert liveness.late_steps(100.0) == [] and liveness.pings(122.0) == [0, 1]
    liveness.mark_answered(0, RUNS, 122.0)
    liveness.mark_answered(1, RUNS, 122.0)
    assert liveness.pings(129.9) == []
    assert liveness.pings(130.0) == [0, 1]
    liveness.mark_answered(0, WAITS, 130.1)
    liveness.mark_answered(1, RUNS, 130.1)
    assert liveness.pings(130.6) == []
    assert liveness.late_steps(130.0 + ANSWER_SECONDS - 0.1) == []
    ((number, error),) = liveness.late_steps(130.0 + ANSWER_SECONDS)
    assert number == 7
    assert isinstance(error, TimeoutError)
    assert str(error).splitlines() == [
        "step 3 has taken longer than step_timeout=30 s, and was ended. What its processes were doing:",
        "  group 0: waiting for message 2 of group 1 in step 7 for 33.0 s",
        "  group 1: running bwd_1__3 in step 7 for 34.0 s",
    ]
    assert liveness.late_steps(200.0) == []


def test_steps_of_other_groups_have_times_of_their_own(pending):
    """As steps of two parts of a mesh have; a step that shares a group with both waits for both."""
    (one,) = pending.add([TWO[0]], step=7)
    pending.add([TWO[1]], step=8)
    pending.add(TWO, step=9)
    pending.add([TWO[0]], step=10)
    liveness = liveness_of(pending, step_timeout=30)
    assert liveness.late_steps(100.0) == []
    pending.succeed(one, None)
    assert liveness.late_steps(120.0) == []
    assert [step.run for step in pending.oldest_steps] == [8]
    assert [number for number, _ in liveness.late_steps(130.0 + ANSWER_SECONDS)] == [8]
    assert liveness.late_steps(155.0) == []


def test_a_group_that_does_not_leave_an_ended_step_is_stuck(pending):
    liveness = liveness_of(pending, step_timeout=30)
    zero, _ = pending.add(TWO, step=7, ordinal=3)
    assert liveness.late_steps(100.0) == []
    pending.succeed(zero, None)
    assert deaths(liveness, 1e6) == []  # it was not ended
    liveness.mark_answered(1, RUNS, 140.0)
    assert liveness.late_steps(140.0)
    assert deaths(liveness, 140.0 + LEAVE_SECONDS - 0.1) == []
    (error,) = deaths(liveness, 140.0 + LEAVE_SECONDS)
    assert isinstance(error, GroupDiedError) and isinstance(error, TimeoutError)
    assert error.mpmd_idx == 1
    assert str(error).startswith("group 1 is stuck: step 3 has taken longer than step_timeout=30 s")
    assert "group 0: has not said yet what it is doing" in str(error)
    assert "group 1: running bwd_1__3 in step 7 for 34.0 s, 10 s ago" in str(error)


def ask_all(liveness, now):
    """Whether all processes are asked for their activity now; they answer."""
    liveness.late_steps(now)
    pinged = liveness.pings(now)
    for number in pinged:
        liveness.mark_answered(number, None, now)
    return bool(pinged)


def test_a_process_in_one_task_for_too_long_is_stuck_and_one_that_waits_is_not(pending):
    liveness = liveness_of(pending, stuck_after=32)
    pending.add(TWO, step=7)
    assert [ask_all(liveness, 100.0 + seconds) for seconds in (8, 15, 16)] == [True, False, True]
    liveness.mark_answered(0, WAITS, 120.0)
    liveness.mark_answered(1, RUNS._replace(seconds=31.0), 120.0)
    assert deaths(liveness, 120.0) == []
    liveness.mark_answered(1, RUNS, 123.0)
    (error,) = deaths(liveness, 123.0)
    assert (type(error), error.mpmd_idx) == (GroupStuckError, 1)
    assert "group 1 is stuck: it is in one task for longer than stuck_after=32 s" in str(error)
    assert deaths(liveness, 124.0) == []


def test_a_process_that_compiles_one_executable_for_too_long_is_stuck(pending):
    """Whether a step is under way or not; and a process that runs a task has the limit of tasks alone."""
    liveness = liveness_of(pending, load_timeout=32)
    assert not ask_all(liveness, 120.0)
    pending.add(TWO)
    assert [ask_all(liveness, now) for now in (120.0, 127.0, 128.0)] == [True, False, True]
    liveness.mark_answered(0, COMPILES._replace(seconds=31.0), 140.0)
    liveness.mark_answered(1, RUNS._replace(seconds=1000.0), 140.0)
    assert deaths(liveness, 140.0) == []
    liveness.mark_answered(0, COMPILES, 151.0)
    (error,) = deaths(liveness, 151.0)
    assert (type(error), error.mpmd_idx) == (GroupStuckError, 0)
    assert str(error).splitlines()[0] == (
        "group 0 is stuck: it is in one part of loading for longer than load_timeout=32 s. "
        "What the processes were doing:"
    )
    assert "  group 0: compiling fwd_1 for 90.0 s" in str(error)
    assert deaths(liveness, 152.0) == []


def test_groups_that_leave_a_late_step_live_on(pending):
    zero, one = pending.add(TWO, step=7)
    (later,) = pending.add([TWO[0]], step=8)
    late = StepTimeoutError("step 7 has taken longer")
    (failed,) = pending.time_out(7, late)
    assert (failed.run, str(failed.failure), failed.mpmd_idxs) == (7, "step 7 has taken longer", {0, 1})
    assert pending.time_out(7, late) == []
    assert not zero.future.done() and [step.run for step in pending.oldest_steps] == [7]
    pending.succeed(zero, "it had ended its part")
    assert pending.running(7) == [TWO[1]]
    pending.fail(one, StepAborted("step 7 has taken longer"))
    assert type(one.future.exception()) is StepTimeoutError
    assert [step.run for step in pending.oldest_steps] == [8]
    pending.succeed(later, None)
    assert pending.oldest_steps == []


def test_every_call_is_watched_but_those_that_end_with_their_process(pending):
    pending.add(TWO, endless=True)
    assert not pending.are_awaited
    (loading,) = pending.add([TWO[1]])
    assert pending.are_awaited
    assert [pending.count_of(process) for process in TWO] == [0, 1]
    pending.succeed(loading, None)
    assert not pending.are_awaited


def test_a_status_is_a_table_of_the_processes():
    infos = [ProcessInfo(i, 0, f"10.0.0.{i}", "node", 10 + i, (), ()) for i in range(2)]
    status = ProcessesStatus(
        (ProcessStatus(infos[0], str(WAITS), 3), ProcessStatus(infos[1], f"dead: {'x' * 99}\nlog", 0))
    )
    assert str(status).splitlines() == [
        "group  process  node      pid  pending  state",
        "0      0        10.0.0.0  10   3        waiting for message 2 of group 1 in step 7 for 33.0 s",
        "1      0        10.0.0.1  11   0        dead: " + "x" * 93 + "…",
    ]


def test_what_a_task_may_take_when_nobody_watches_the_steps():
    assert not TimeLimits().exclude(RUNS)
    assert TimeLimits(stuck_after=34).exclude(RUNS)
    assert not TimeLimits(stuck_after=34.1).exclude(RUNS)
    assert TimeLimits(step_timeout=34 - LEAVE_SECONDS).exclude(RUNS)
    assert not TimeLimits(step_timeout=34.1 - LEAVE_SECONDS).exclude(RUNS)
    assert not TimeLimits(step_timeout=1, stuck_after=1, load_timeout=1).exclude(WAITS)
    assert not TimeLimits(step_timeout=1, stuck_after=1).exclude(COMPILES)
    assert TimeLimits(load_timeout=90).exclude(COMPILES)
    assert not TimeLimits(load_timeout=90.1).exclude(COMPILES)
