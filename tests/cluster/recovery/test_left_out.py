"""Groups that recovery leaves out: their requests, the steps that are refused, and the arguments of users."""

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pytest

from cluster.recovery import Recovery
from cluster.recovery.left_out import crossing_fault
from cluster.recovery.policy import check_recovery, left_out_groups
from mpmd.errors import GroupDiedError, RecoveryError, StateLostError, TaskError
from mpmd.ir.plan import Aval, GroupProgram, InputLeaf, OutputLeaf, Plan, Recv, Send
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import Released, StepReply, add_reply, reply_of
from mpmd.runtime.survey import take_digests
from tests.support.pretended_groups import (
    SOON,
    TOGETHER,
    begin_recovery,
    end_recovery,
    runtime,
)


@pytest.fixture
def driven():
    """Groups 0 and 1, and group 2, which is left out."""
    return runtime(left_out=(2,))


def die_left_out(driven):
    """Group 2 dies: its calls fail, and then the runtime is told."""
    death = GroupDiedError("group 2 died", 2)
    calls = driven.attempts[-1]
    for _, futures in calls.steps:
        if 2 in futures:
            for future in futures.values():
                if not future.done():
                    future.set_exception(death)
    driven._processes.on_death(death)


class Interrupting(Future):
    """An answer. The user interrupts the program just before its end is to be noted."""

    def add_done_callback(self, function):
        signal.raise_signal(signal.SIGINT)
        super().add_done_callback(function)


def test_a_request_that_was_interrupted_does_not_keep_groups_from_being_replaced(driven):
    answer = Interrupting()
    driven.attempts[0].ask_step = lambda requests: {2: answer}
    with pytest.raises(KeyboardInterrupt):
        driven.step(groups=(2,))
    answer.set_result(StepReply({}))
    assert driven._ledger.unlogged == set()


def test_a_death_is_the_error_of_what_reads_the_results_of_the_step_that_it_has_ended(driven):
    copied = driven.step(inputs=(1,), outputs=(3,), groups=(0, 2))
    drawn = driven.step(inputs=(3,), outputs=(4,), groups=(2,))
    other = driven.step(inputs=(9,), groups=(2,))
    calls = driven.attempts[0]
    death = GroupDiedError("group 0 died", 0)
    for future in calls.steps[0][1].values():
        future.set_exception(death)
    driven._processes.on_death(death)
    calls.steps[1][1][2].set_exception(LostValueError("group 0 died"))
    calls.steps[2][1][2].set_exception(LostValueError("a task failed"))
    for future in (copied[2], drawn[2]):
        with pytest.raises(GroupDiedError, match="group 0 died"):
            future.result(SOON)
    with pytest.raises(LostValueError, match="a task failed"):
        other[2].result(SOON)
    for handle in (3, 4):
        driven.free((2,), handle)
    assert driven._ledger.left_out.lost == {}, "nobody can ask for what is freed"


def test_the_error_of_a_step_has_what_its_group_has_sent_until_then(driven):
    failed, lost = driven.step(outputs=(3,), groups=(2,)), driven.step(inputs=(4,), groups=(2,))
    driven._ledger.left_out.lost[4] = GroupDiedError("group 0 died", 0)
    errors = TaskError("out of memory", 2, "fwd_0__0"), LostValueError("group 0 died")
    for index, (error, future) in enumerate(zip(errors, (failed[2], lost[2]), strict=True)):
        add_reply(error, StepReply({}, callback_operands=("operands",), captured="task"))
        driven.attempts[0].fail(index, error)
        assert reply_of(future).callback_operands == ("operands",) and reply_of(future).captured == "task"
    with pytest.raises(TaskError, match="out of memory"):
        failed[2].result()
    with pytest.raises(GroupDiedError, match="group 0 died"):
        lost[2].result()


def test_living_groups_of_a_step_that_is_not_sent_drop_values():
    driven = runtime(left_out=(2, 3))
    calls = driven.attempts[0]
    calls.dead.add(2)
    driven.free((2, 3), 41)
    with pytest.raises(GroupDiedError):
        driven.step(groups=(2, 3))[3].result(SOON)
    assert calls.named("Release") == [(3, Released((41,)))]


def test_a_group_that_is_left_out_has_its_values_when_those_of_the_others_are_lost(driven):
    driven._processes.failures = [TOGETHER]
    before = driven.next_handle()
    driven.die(0)
    for groups in ((0, 1), (0, 2)):
        with pytest.raises(StateLostError):
            driven.step(inputs=(before,), groups=groups)[0].result(SOON)
    drawn = driven.step(inputs=(before,), groups=(2,))
    driven.fetch(2, before)
    assert list(drawn) == [2] and len(driven.attempts[1].steps) == 1
    assert driven.attempts[1].named("Fetch") == [(2, before)]


def test_arrays_of_the_host_are_no_part_of_a_copy_to_a_group_that_is_left_out(driven):
    with pytest.raises(ValueError, match="takes no arrays of the host"):
        driven.step({8: np.ones(3)}, groups=(0, 2))[0].result(SOON)
    assert driven.attempts[0].steps == []


def test_the_end_of_the_run_is_the_end_of_waiting_for_a_replacement(driven):
    die_left_out(driven)
    with pytest.raises(RuntimeError, match=r"replace: group 2 did not begin anew within 0\.01 s"):
        driven.replace([2], 0.01)
    driven._ledger.error = RecoveryError("over", 0)
    with pytest.raises(RecoveryError, match="over"):
        driven.replace([2], SOON)


def test_a_replacement_waits_for_others_that_recover(driven):
    begin_recovery(driven, 0)
    with pytest.raises(RuntimeError, match=r"replace: other groups have recovered or moved for 0\.01 s"):
        driven.replace([2], 0.01)
    end_recovery(driven)
    driven.replace([2], SOON)


def test_a_replacement_waits_for_others_of_whose_death_a_step_knows_before(driven, monkeypatch):
    death = GroupDiedError("group 0 died", 0)
    monkeypatch.setattr(driven.attempts[0], "death_of", {0: death}.get, raising=False)
    driven.replace([2], SOON)
    assert len(driven.attempts) == 2 and not driven.is_recovering


def test_a_group_that_is_dead_does_not_move_before_it_is_replaced(driven):
    driven._processes.can_share, driven._processes.num_own = True, 3
    die_left_out(driven)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"resize\(2\): group 2 cannot move.*call mesh\.replace"):
        driven.resize(2, SOON)
    assert time.monotonic() < start + SOON / 2


@pytest.mark.parametrize("is_heard", [True, False])
def test_values_of_a_group_that_is_dead_are_not_compared(driven, is_heard):
    if is_heard:
        die_left_out(driven)
    calls = driven.attempts[-1]
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(take_digests, driven)
        while not wait([taking], timeout=0.01).done:
            for number, _, _, future in [each for each in calls.made if not each[-1].done()]:
                if number == 2:
                    future.set_exception(GroupDiedError("group 2 died", 2))
                else:
                    future.set_result(number)
        assert taking.result() == (0, 1)


TYPE = Aval((2,), "float32", 4)


def copy_plan(src, dst, donated=False, results=()):
    """Group ``src`` sends a value to ``dst``. It is a result there, and on the groups ``results``."""
    programs = {i: [] for i in (0, 1, 2)}
    programs[src].append(Send(("x",), dst, 0))
    programs[dst].append(Recv(("x",), src, 0))
    return Plan(
        tuple(GroupProgram(i, tuple(program)) for i, program in programs.items()),
        (),
        (InputLeaf("x", "x", TYPE, (src,), (), donated),),
        (),
        tuple(OutputLeaf("", "x", TYPE, (group,), ()) for group in (dst, *results)),
    )


@pytest.mark.parametrize(
    ("plan", "left_out"),
    [(copy_plan(0, 1), {2}), (copy_plan(0, 1), {0, 1}), (copy_plan(2, 0), set()), (copy_plan(0, 2), {1, 2})],
)
def test_programs_of_one_kind_of_groups_and_copies_to_those_left_out_are_loaded(plan, left_out):
    assert crossing_fault(plan, left_out) is None


@pytest.mark.parametrize(
    "plan",
    [copy_plan(2, 0), copy_plan(2, 1, results=[2]), copy_plan(0, 2, True), copy_plan(0, 2, results=[0])],
)
def test_programs_that_others_could_not_run_again_are_refused(plan):
    fault = crossing_fault(plan, {2})
    assert fault is not None and "and on group 2, of a part that Recovery(parts=...) leaves out" in str(fault)


def test_parts_are_named_as_the_mesh_has_them():
    left_out = Recovery(parts={"sampler": None})
    assert left_out_groups(left_out, {"trainer": 2, "sampler": 1}) == {2}
    assert left_out_groups(Recovery(), {"trainer": 2}) == left_out_groups(None, None) == frozenset()
    with pytest.raises(ValueError, match="names 'sampler', and the parts of the mesh are 'actor'"):
        left_out_groups(left_out, {"actor": 2})
    with pytest.raises(TypeError, match=r"parts\['sampler'\] must be None"):
        Recovery(parts={"sampler": 3})
    with pytest.raises(TypeError, match="parts must be a dict of names and None"):
        Recovery(parts=["sampler"])
    check_recovery(left_out, [{}] * 3, {2})
    check_recovery(left_out, [{}] * 2, {0, 1})
    with pytest.raises(ValueError, match="two groups at least that it does not leave out"):
        check_recovery(left_out, [{}] * 2, {1})
