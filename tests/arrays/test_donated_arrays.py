"""Arrays that a step takes over, on groups that go back when it fails."""

import gc
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh

from mpmd.arrays.array import Held, MpmdArray, StepFuture
from mpmd.errors import TaskError
from mpmd.ir.placement import Placement
from mpmd.runtime.requests import StepReply

AVAL = jax.ShapeDtypeStruct((4,), "float32")
SUBMESHES = (AbstractMesh((1,), ("stage",), (jax.sharding.AxisType.Auto,)),)
FAILED = TaskError("out of memory", 1, "fwd_1__0")


class Groups:
    """A runtime that notes what it is to free. It can be referred to weakly."""

    def __init__(self, goes_back):
        self.goes_back, self.left_out = goes_back, frozenset()
        self.freed = []

    def free(self, mpmd_idxs, handle):
        self.freed.append((mpmd_idxs, handle))


def donated(groups):
    """An array of group 0 that a step of two groups has taken over, and the replies of these."""
    array = MpmdArray(AVAL, groups, Held(Placement((0,), ()), SUBMESHES, 7, SimpleNamespace()))
    replies = {0: Future(), 1: Future()}
    array.donate_to(StepFuture(replies))
    return array, replies


def test_it_is_freed_when_the_step_has_succeeded_everywhere():
    groups = Groups(goes_back=True)
    array, replies = donated(groups)
    replies[0].set_result(StepReply({}))
    assert array.is_deleted() and groups.freed == []
    replies[1].set_result(StepReply({}))
    assert array.is_deleted() and groups.freed == [((0,), 7)]
    del array
    assert groups.freed == [((0,), 7)]


def test_it_is_there_again_when_the_step_has_failed():
    groups = Groups(goes_back=True)
    array, replies = donated(groups)
    with pytest.raises(RuntimeError, match="donated"):
        _ = array.handle
    replies[0].set_result(StepReply({}))
    replies[1].set_exception(FAILED)
    assert not array.is_deleted() and array.handle == 7 and groups.freed == []
    array.delete()
    assert array.is_deleted() and groups.freed == [((0,), 7)]


@pytest.mark.parametrize("dropped_before", [True, False])
def test_nothing_is_left_when_the_caller_has_dropped_it(dropped_before):
    groups = Groups(goes_back=True)
    array, replies = donated(groups)
    if dropped_before:
        del array
        gc.collect()
        assert groups.freed == []
    for reply in replies.values():
        reply.set_exception(FAILED)
    if not dropped_before:
        del array
        gc.collect()
    assert groups.freed == [((0,), 7)]


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_taken_over_the_result_of_a_step_goes_back_when_the_step_fails(fails):
    """As after an interrupt of the call, which so returns no result."""
    groups = Groups(goes_back=True)
    array, replies = donated(groups)
    result = MpmdArray(AVAL, groups, Held(Placement((1,), ()), SUBMESHES, 8, StepFuture(replies)))
    array.take_over(result)
    assert result.is_deleted() and array.handle == 8 and array.mpmd_idxs == (1,) and not groups.freed
    for reply in replies.values():
        if fails:
            reply.set_exception(FAILED)
        else:
            reply.set_result(StepReply({}))
    assert (array.handle, array.mpmd_idxs) == ((7, (0,)) if fails else (8, (1,)))
    assert groups.freed == [((1,), 8) if fails else ((0,), 7)]
    del array, result
    assert sorted(groups.freed) == [((0,), 7), ((1,), 8)]


def test_groups_that_do_not_go_back_free_it_at_once():
    groups = Groups(goes_back=False)
    array, replies = donated(groups)
    assert groups.freed == [((0,), 7)]
    replies[1].set_exception(FAILED)
    assert array.is_deleted()
