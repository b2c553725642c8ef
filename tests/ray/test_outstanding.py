"""What follows from which event, without Ray."""

import pytest

from cluster.outstanding import Abort, Outstanding
from mpmd.errors import GroupDiedError, StepAborted, TaskError

FAILED = TaskError("fwd_1__0 failed on group 1", 1, "fwd_1__0")
DIED = GroupDiedError("group 1 died", 1)


@pytest.fixture
def outstanding():
    return Outstanding()


def test_replies_settle_futures_in_any_order(outstanding):
    first, second = outstanding.add([0, 1], step=7)
    outstanding.succeed(second, "b")
    assert not first.future.done()
    outstanding.succeed(first, "a")
    assert (first.future.result(), second.future.result()) == ("a", "b")


def test_the_first_failure_of_a_step_aborts_it_once(outstanding):
    zero, one, two = outstanding.add([0, 1, 2], step=7)
    assert outstanding.fail(one, FAILED) == [Abort(7, "fwd_1__0 failed on group 1")]
    assert outstanding.fail(zero, StepAborted("fwd_1__0 failed on group 1")) == []
    assert outstanding.fail(two, TaskError("fwd_2__0 failed too", 2, "fwd_2__0")) == []
    assert one.future.exception() is FAILED
    assert isinstance(zero.future.exception(), StepAborted)
    assert zero.future.exception().__cause__ is FAILED
    assert two.future.exception().mpmd_idx == 2


def test_a_failed_step_leaves_the_others_alone(outstanding):
    (failed,) = outstanding.add([1], step=7)
    (other,) = outstanding.add([0], step=8)
    outstanding.fail(failed, FAILED)
    outstanding.succeed(other, "fine")
    assert other.future.result() == "fine"


def test_a_failed_call_outside_steps_aborts_nothing(outstanding):
    (ticket,) = outstanding.add([1])
    assert outstanding.fail(ticket, FAILED) == []
    assert ticket.future.exception() is FAILED


def test_a_death_ends_all_steps_the_group_has_a_part_in(outstanding):
    zero, one = outstanding.add([0, 1], step=7)
    (other,) = outstanding.add([0], step=8)
    (fetch,) = outstanding.add([1])
    outstanding.succeed(one, "its part was done")
    assert outstanding.bury(1, DIED) == [Abort(7, "group 1 died")]
    assert outstanding.bury(1, GroupDiedError("again", 1)) == []
    for future in (zero.future, fetch.future):
        assert str(future.exception()) == "group 1 died"
        assert future.exception().mpmd_idx == 1
    assert not other.future.done()
    outstanding.succeed(zero, "too late")
    assert outstanding.fail(zero, StepAborted("too late")) == []


def test_calls_on_dead_groups_are_refused(outstanding):
    outstanding.bury(1, DIED)
    with pytest.raises(GroupDiedError, match="group 1 died"):
        outstanding.add([0, 1], step=7)
    (ticket,) = outstanding.add([0], step=7)
    outstanding.succeed(ticket, None)


def test_close_fails_everything_now_and_later(outstanding):
    tickets = [*outstanding.add([0, 1], step=7), *outstanding.add([1])]
    outstanding.close(RuntimeError("closed"))
    outstanding.close(RuntimeError("closed twice"))
    for ticket in tickets:
        assert str(ticket.future.exception()) == "closed"
        outstanding.succeed(ticket, "too late")
    with pytest.raises(RuntimeError, match="closed"):
        outstanding.add([0])


def test_futures_cannot_be_cancelled(outstanding):
    (ticket,) = outstanding.add([0])
    assert not ticket.future.cancel()
    outstanding.succeed(ticket, 1)
