"""When a step or a task takes too long, what is said of it, and what follows."""

import pytest

import cluster
from cluster.driver.calls.pending_calls import AbortRequest, PendingCalls
from cluster.driver.calls.watchdog import ANSWER_SECONDS, LEAVE_SECONDS, Limits, Watchdog
from cluster.driver.status import ProcessStatus, Status
from cluster.protocol.process_info import ProcessInfo
from mpmd.errors import GroupDiedError, GroupStuckError, StepAborted, StepTimeoutError
from mpmd.runtime.activity import Doing, Kind
from tests.support.processes import endpoints

TWO = endpoints([1, 1])
WAITS = Doing("waiting for message 2 of group 1", 7, Kind.OTHER, 33.0)
RUNS = Doing("running bwd_1__3", 7, Kind.TASK, 34.0)
COMPILES = Doing("compiling fwd_1", None, Kind.LOAD, 90.0)


def watchdog_of(**limits):
    return Watchdog(TWO, Limits(**limits))


def test_without_limits_nothing_is_asked_or_ended():
    watchdog = watchdog_of()
    watchdog.observe({7: 3}, 100.0)
    watchdog.report(1, RUNS, 100.0)
    watchdog.report(0, COMPILES, 100.0)
    assert not watchdog.asks(1e6, is_awaited=True)
    assert watchdog.late_steps(1e6) == [] and watchdog.stuck(1e6) == []


def test_a_late_step_is_ended_once_and_its_processes_are_asked_before():
    watchdog = watchdog_of(step_timeout=30)
    watchdog.observe({7: 3}, 100.0)
    assert not watchdog.asks(129.9, True)
    assert watchdog.asks(130.0, True)
    assert not watchdog.asks(130.6, True)
    watchdog.report(0, WAITS, 130.1)
    watchdog.report(1, RUNS, 130.1)
    assert watchdog.late_steps(130.0 + ANSWER_SECONDS - 0.1) == []
    ((number, error),) = watchdog.late_steps(130.0 + ANSWER_SECONDS)
    assert number == 7
    assert isinstance(error, TimeoutError)
    assert str(error).splitlines() == [
        "step 3 has taken longer than step_timeout=30 s, and was ended. What its processes were doing:",
        "  group 0: waiting for message 2 of group 1 in step 7 for 33.0 s",
        "  group 1: running bwd_1__3 in step 7 for 34.0 s",
    ]
    assert watchdog.late_steps(200.0) == []


def test_a_step_has_its_time_from_the_end_of_the_one_before():
    watchdog = watchdog_of(step_timeout=30)
    watchdog.observe({7: 3}, 100.0)
    watchdog.observe({8: 4}, 125.0)
    assert watchdog.late_steps(131.0 + ANSWER_SECONDS) == []
    assert [number for number, _ in watchdog.late_steps(155.0 + ANSWER_SECONDS)] == [8]
    watchdog.observe({}, 157.0)
    assert watchdog.late_steps(1e6) == []


def test_steps_of_other_groups_have_times_of_their_own():
    """As steps of two parts of a mesh have; a step that shares a group with both waits for both."""
    pending = PendingCalls()
    (one,) = pending.add([TWO[0]], step=7)
    pending.add([TWO[1]], step=8)
    pending.add(TWO, step=9)
    pending.add([TWO[0]], step=10)
    watchdog = watchdog_of(step_timeout=30)
    watchdog.observe(pending.oldest_steps, 100.0)
    pending.succeed(one, None)
    watchdog.observe(pending.oldest_steps, 120.0)
    assert list(pending.oldest_steps) == [8]
    assert [number for number, _ in watchdog.late_steps(130.0 + ANSWER_SECONDS)] == [8]
    assert watchdog.late_steps(155.0) == []


def test_a_group_that_does_not_leave_an_ended_step_is_stuck():
    watchdog = watchdog_of(step_timeout=30)
    watchdog.observe({7: 3}, 100.0)
    assert watchdog.remaining(lambda step: [TWO[1]], 1e6) == []  # it was not ended
    watchdog.report(1, RUNS, 140.0)
    assert watchdog.late_steps(140.0)
    assert watchdog.remaining(lambda step: [TWO[1]], 140.0 + LEAVE_SECONDS - 0.1) == []
    (error,) = watchdog.remaining(lambda step: [TWO[1]], 140.0 + LEAVE_SECONDS)
    assert isinstance(error, GroupDiedError) and isinstance(error, TimeoutError)
    assert error.mpmd_idx == 1
    assert str(error).startswith("group 1 is stuck: step 3 has taken longer than step_timeout=30 s")
    assert "group 0: has not said yet what it is doing" in str(error)
    assert "group 1: running bwd_1__3 in step 7 for 34.0 s, 10 s ago" in str(error)


def test_a_process_in_one_task_for_too_long_is_stuck_and_one_that_waits_is_not():
    watchdog = watchdog_of(stuck_after=32)
    watchdog.observe({7: 3}, 100.0)
    assert [watchdog.asks(100.0 + seconds, True) for seconds in (8, 15, 16)] == [True, False, True]
    watchdog.report(0, WAITS, 120.0)
    watchdog.report(1, RUNS._replace(seconds=31.0), 120.0)
    assert watchdog.stuck(120.0) == []
    watchdog.report(1, RUNS, 123.0)
    (error,) = watchdog.stuck(123.0)
    assert (type(error), error.mpmd_idx) == (GroupStuckError, 1)
    assert "group 1 is stuck: it is in one task for longer than stuck_after=32 s" in str(error)
    assert watchdog.stuck(124.0) == []


def test_a_process_that_compiles_one_executable_for_too_long_is_stuck():
    """Whether a step is under way or not; and a process that runs a task has the limit of tasks alone."""
    watchdog = watchdog_of(load_timeout=80)
    watchdog.observe({}, 100.0)
    assert not watchdog.asks(120.0, is_awaited=False)
    assert [watchdog.asks(now, is_awaited=True) for now in (120.0, 139.0, 140.0)] == [True, False, True]
    watchdog.report(0, COMPILES._replace(seconds=79.0), 140.0)
    watchdog.report(1, RUNS._replace(seconds=1000.0), 140.0)
    assert watchdog.stuck(140.0) == []
    watchdog.report(0, COMPILES, 151.0)
    (error,) = watchdog.stuck(151.0)
    assert (type(error), error.mpmd_idx) == (GroupStuckError, 0)
    assert str(error).splitlines()[0] == (
        "group 0 is stuck: it is in one part of loading for longer than load_timeout=80 s. "
        "What the processes were doing:"
    )
    assert "  group 0: compiling fwd_1 for 90.0 s" in str(error)
    assert watchdog.stuck(152.0) == []


def test_groups_that_leave_a_late_step_live_on():
    pending = PendingCalls()
    zero, one = pending.add(TWO, step=7)
    (later,) = pending.add([TWO[0]], step=8)
    late = StepTimeoutError("step 7 has taken longer")
    assert pending.time_out(7, late) == [AbortRequest(7, "step 7 has taken longer", frozenset([0, 1]))]
    assert pending.time_out(7, late) == []
    assert not zero.future.done() and list(pending.oldest_steps) == [7]
    pending.succeed(zero, "it had ended its part")
    assert pending.running(7) == [TWO[1]]
    pending.fail(one, StepAborted("step 7 has taken longer"))
    assert type(one.future.exception()) is StepTimeoutError
    assert list(pending.oldest_steps) == [8]
    pending.succeed(later, None)
    assert list(pending.oldest_steps) == []


def test_every_call_is_watched_but_those_that_end_with_their_process():
    pending = PendingCalls()
    pending.add(TWO, endless=True)
    assert not pending.are_awaited
    (loading,) = pending.add([TWO[1]])
    assert pending.are_awaited
    assert [pending.count_of(process) for process in TWO] == [0, 1]
    pending.succeed(loading, None)
    assert not pending.are_awaited


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ({"step_timeout": 0}, ValueError, "step_timeout must be a number of seconds above 0, or None, not 0"),
        ({"stuck_after": float("nan")}, ValueError, "stuck_after must be a number of seconds above 0"),
        ({"stuck_after": "1 min"}, TypeError, "stuck_after must be a number of seconds above 0, or None"),
        ({"load_timeout": -1}, ValueError, "load_timeout must be a number of seconds above 0"),
        ({"max_in_flight": 0}, ValueError, "max_in_flight must be a whole number of at least 1, not 0"),
    ],
)
def test_limits_that_are_none(limits, error, message):
    with pytest.raises(error, match=message):
        cluster.launch({"stage": 2}, "stage", **limits)


def test_a_status_is_a_table_of_the_processes():
    infos = [ProcessInfo(i, 0, f"10.0.0.{i}", "node", 10 + i, (), ()) for i in range(2)]
    status = Status(
        (ProcessStatus(infos[0], str(WAITS), 3), ProcessStatus(infos[1], f"dead: {'x' * 99}\nlog", 0))
    )
    assert str(status).splitlines() == [
        "group  process  node      pid  pending  state",
        "0      0        10.0.0.0  10   3        waiting for message 2 of group 1 in step 7 for 33.0 s",
        "1      0        10.0.0.1  11   0        dead: " + "x" * 93 + "…",
    ]


def test_what_a_task_may_take_when_nobody_watches_the_steps():
    assert not Limits().exclude(RUNS)
    assert Limits(stuck_after=34).exclude(RUNS)
    assert not Limits(stuck_after=34.1).exclude(RUNS)
    assert Limits(step_timeout=34 - LEAVE_SECONDS).exclude(RUNS)
    assert not Limits(step_timeout=34.1 - LEAVE_SECONDS).exclude(RUNS)
    assert not Limits(step_timeout=1, stuck_after=1, load_timeout=1).exclude(WAITS)
    assert not Limits(step_timeout=1, stuck_after=1).exclude(COMPILES)
    assert Limits(load_timeout=90).exclude(COMPILES)
    assert not Limits(load_timeout=90.1).exclude(COMPILES)
