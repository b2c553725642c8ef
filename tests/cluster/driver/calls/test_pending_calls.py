"""Consequences of calls, replies, failures and deaths."""

import pytest

from cluster.driver.calls.pending_calls import PendingCalls
from mpmd.errors import GroupDiedError, StepAborted, TaskError
from tests.support.processes import endpoints

ZERO, ONE, TWO = endpoints([1, 1, 1])
FAILED = TaskError("fwd_1__0 failed on group 1", 1, "fwd_1__0")
DIED = GroupDiedError("group 1 died", 1)


@pytest.fixture
def pending():
    return PendingCalls()


def test_the_first_failure_of_a_step_aborts_it_once(pending):
    zero, one, two = pending.add([ZERO, ONE, TWO], step=7)
    (later,) = pending.add([ONE], step=8)
    (failed,) = pending.fail(one, FAILED)
    assert (failed.run, failed.failure, failed.mpmd_idxs) == (7, FAILED, {0, 1, 2})
    assert pending.fail(zero, StepAborted("fwd_1__0 failed on group 1")) == []
    assert pending.fail(two, TaskError("fwd_2__0 failed too", 2, "fwd_2__0")) == []
    assert one.future.exception() is FAILED
    assert isinstance(zero.future.exception(), StepAborted)
    assert zero.future.exception().__cause__ is FAILED
    assert two.future.exception().mpmd_idx == 2
    pending.succeed(later, "other steps are not affected")
    assert later.future.exception() is None


def test_a_step_is_half_answered_where_one_process_of_a_group_still_runs_it(pending):
    processes = endpoints([2, 1, 2])
    calls = pending.add(processes, step=7)
    assert pending.half_answered(7) == []
    pending.succeed(calls[0], "a")
    pending.fail(calls[3], FAILED)
    assert pending.half_answered(7) == [0, 2]
    pending.succeed(calls[1], "b")
    assert pending.half_answered(7) == [2]
    pending.fail(calls[4], FAILED)
    assert pending.half_answered(7) == []


def test_a_death_ends_all_steps_the_group_has_a_part_in(pending):
    zero, one = pending.add([ZERO, ONE], step=7)
    (other,) = pending.add([ZERO], step=8)
    (fetch,) = pending.add([ONE])
    pending.succeed(one, "its part was done")
    (failed,) = pending.mark_dead(1, DIED)
    assert (failed.run, failed.failure, failed.mpmd_idxs) == (7, DIED, {0, 1})
    assert pending.mark_dead(1, GroupDiedError("again", 1)) == []
    for future in (zero.future, fetch.future):
        assert str(future.exception()) == "group 1 died"
        assert future.exception().mpmd_idx == 1
    assert not other.future.done()
    pending.succeed(zero, "too late")
    assert pending.fail(zero, StepAborted("too late")) == []
    with pytest.raises(GroupDiedError, match="group 1 died"):
        pending.add([ZERO, ONE], step=9)
    (later,) = pending.add([ZERO], step=9)
    pending.succeed(later, "the others go on")


def test_futures_cannot_be_cancelled(pending):
    (call,) = pending.add([ZERO])
    assert not call.future.cancel()
    pending.succeed(call, 1)


def test_the_numbers_of_steps_ascend(pending):
    """Groups that have begun a step know nothing of earlier ones."""
    (call,) = pending.add([ZERO], step=7)
    pending.succeed(call, None)
    with pytest.raises(AssertionError, match="step 6 comes after step 7"):
        pending.add([ZERO], step=6)
