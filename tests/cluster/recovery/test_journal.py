"""The journal: what is believed, given, committed and asked again, for every order of events."""

import dataclasses

import numpy as np
import pytest

from cluster.recovery.journal import BEGINNING
from mpmd.errors import RecoveryError
from mpmd.runtime.requests import Released, StepReply, StepRequest
from tests.support.counting_journal import CountingJournal

GROUPS = (0, 1, 2)


def requests(program=0):
    return {i: StepRequest(program, 0, (), ()) for i in GROUPS}


@pytest.fixture
def journal():
    return CountingJournal()


def told(outcomes):
    return [(outcome.mpmd_idx, outcome.error) for outcome in outcomes]


def reply(value=0.0):
    return StepReply({1: np.float32(value)})


def answered_by_all(journal, step):
    return [told(journal.answer(step, i, reply())) for i in GROUPS]


def commit(journal):
    snapshot = journal.begin_snapshot({})
    journal.mark_copied(journal.attempt, snapshot)
    assert journal.committed == snapshot.number


def test_results_are_given_at_once_and_errors_when_all_before_is_answered(journal):
    first, second = journal.add_step(requests()), journal.add_step(requests())
    error = RuntimeError("a task failed")
    assert told(journal.answer(second, 0, reply())) == [(0, None)]
    assert told(journal.answer(second, 1, error=error)) == []
    assert told(journal.answer(second, 2, reply())) == [(2, None)]
    for i in (0, 1):
        assert told(journal.answer(first, i, reply())) == [(i, None)]
    assert told(journal.answer(first, 2, reply())) == [(2, None), (1, error)]


def recorded():
    return {i: dataclasses.replace(request, profile=True) for i, request in requests().items()}


def test_results_of_a_recorded_step_are_of_one_attempt(journal):
    step = journal.add_step(recorded())
    assert told(journal.answer(step, 0, reply(1.0))) == []
    assert told(journal.answer(step, 1, reply(1.0))) == []
    journal.suspend()
    journal.go_back()
    again = {i: reply(2.0) for i in GROUPS}
    assert journal.answer(step, 2, again[2]) == []
    assert journal.answer(step, 1, again[1]) == []
    outcomes = journal.answer(step, 0, again[0])
    assert {outcome.mpmd_idx: outcome.result for outcome in outcomes} == again


def test_a_step_that_fails_after_a_run_that_did_not_is_not_compared(journal):
    step = journal.add_step(recorded())
    journal.answer(step, 0, reply())
    journal.suspend()
    journal.go_back()
    journal.answer(step, 0, error=RuntimeError("a task failed"))
    for i in (1, 2):
        journal.answer(step, i, reply())
    assert step.replies == {}


def test_results_of_a_recorded_step_that_fails_are_given_with_the_error(journal):
    """The answer is given when all before is answered; until then the step may run again."""
    before, step = journal.add_step(requests()), journal.add_step(recorded())
    error = RuntimeError("a task failed")
    for i in (0, 1):
        assert journal.answer(before, i, reply())
        assert journal.answer(step, i, reply()) == []
    assert journal.answer(step, 2, error=error) == []
    assert told(journal.answer(before, 2, reply())) == [(2, None), (0, None), (1, None), (2, error)]


def test_an_error_before_a_death_is_not_given(journal):
    """A group that waits for a dead one may notice before the driver does."""
    step = journal.add_step(requests())
    assert told(journal.answer(step, 0, error=RuntimeError("group 1 is gone"))) == []
    journal.suspend()
    assert told(journal.answer(step, 2, error=RuntimeError("the calls were closed"), attempt=0)) == []
    assert journal.go_back() == (step,)
    assert answered_by_all(journal, step) == [[(i, None)] for i in GROUPS]


def test_what_is_answered_twice_is_given_once_and_has_to_be_the_same(journal):
    step = journal.add_step(requests())
    assert told(journal.answer(step, 0, reply(np.nan))) == [(0, None)]
    journal.suspend()
    journal.go_back()
    assert told(journal.answer(step, 0, reply(np.nan))) == []
    journal.go_back()
    with pytest.raises(RecoveryError, match="step 1 gave another result on group 0"):
        journal.answer(step, 0, reply(0.0))


def test_a_step_that_fails_when_it_is_run_again_has_changed(journal):
    step = journal.add_step(requests())
    answered_by_all(journal, step)
    journal.go_back()
    for i in (0, 1):
        journal.answer(step, i, reply())
    with pytest.raises(RecoveryError, match=r"step 1 failed on group 2 .*: out of memory\.") as caught:
        journal.answer(step, 2, error=(error := RuntimeError("out of memory")))
    assert caught.value.__cause__ is error


def test_a_snapshot_under_way_is_given_up_when_groups_go_back(journal):
    first = journal.add_step(requests())
    answered_by_all(journal, first)
    snapshot = journal.begin_snapshot({0: Released((5,))})
    second = journal.add_step(requests())
    assert journal.steps_since_snapshot == 1
    old = journal.attempt
    journal.suspend()
    journal.mark_copied(old, snapshot)  # too late
    assert journal.go_back() == (first, second)
    journal.mark_copied(old, snapshot)
    assert (journal.committed, journal.snapshot, journal.steps_since_snapshot) == (BEGINNING, None, 2)


def test_a_value_that_was_given_is_not_asked_again(journal):
    step = journal.add_step(requests())
    given, waiting = journal.add_fetch(0, 1), journal.add_fetch(0, 1)
    assert told(journal.answer(given, 0, np.ones(2))) == [(0, None)]
    assert journal.go_back() == (step, waiting)


def test_what_could_not_be_read_is_told_once_whatever_becomes_of_it(journal):
    read, error = journal.add_read(1, {5: "stored"}), OSError("no such file")
    assert told(journal.answer(read, 1, error=error)) == [(1, error)]
    journal.go_back()
    assert told(journal.answer(read, 1, error=error)) == []
    journal.go_back()
    assert told(journal.answer(read, 1, StepReply({}))) == []


def test_no_snapshot_is_committed_while_groups_are_being_replaced(journal):
    """They go back to the one that was committed when the first of them died."""
    copy = journal.add_copy(1, 9, [5])
    journal.answer(copy, 1, None)
    journal.mark_copied(0, journal.begin_snapshot({}))
    journal.suspend()
    journal.drop_copies()
    assert journal.committed == BEGINNING
    assert journal.go_back() == ()


def test_when_values_are_lost_all_that_is_not_answered_fails_and_nothing_is_asked_again(journal):
    answered_by_all(journal, journal.add_step(requests()))
    commit(journal)
    journal.begin_snapshot({})
    step, fetch, read = (
        journal.add_step(requests(program=4)),
        journal.add_fetch(0, 1),
        journal.add_read(2, {}),
    )
    copy = journal.add_copy(1, 9, [5])
    journal.answer(step, 1, reply())
    journal.suspend()
    error = RuntimeError("lost")
    outcomes = journal.lose_values(error)
    assert [(o.request, o.mpmd_idx) for o in outcomes] == [
        (step, 0),
        (step, 2),
        (fetch, 0),
        (read, 2),
        (copy, 1),
    ]
    assert all(outcome.error is error for outcome in outcomes)
    assert (journal.committed, journal.go_back(), journal.snapshot) == (BEGINNING, (), None)
    assert journal.programs == set()
    assert journal.add_step(requests()).ordinal == 3


def test_programs_live_as_long_as_a_replay_may_need_them(journal):
    step = journal.add_step(requests(program=4))
    assert journal.programs == {4}
    answered_by_all(journal, step)
    assert journal.programs == {4}
    commit(journal)
    assert journal.programs == set()


def test_the_step_that_a_group_is_at(journal):
    assert journal.current_step(0) is None
    first, second = journal.add_step(requests()), journal.add_step(requests())
    journal.answer(first, 0, reply())
    assert (journal.current_step(0), journal.current_step(1)) == (second, first)
    assert (first.ordinal, second.ordinal) == (1, 2)
